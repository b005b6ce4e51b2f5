// SPDX-License-Identifier: Apache-2.0
//
// Every path of rotation against the formula in double, for all shapes of tile that the fast paths
// have.
#include "crumb/cuda/rotate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <tuple>
#include <vector>

namespace crumb {
namespace {

std::vector<float> RandomFloats(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) {
    value = normal(random);
  }
  return values;
}

// Any matrix will do: that a rotation is orthogonal is the profile's business.
struct Head {
  explicit Head(size_t dim) : matrix(RandomFloats(dim * dim, 1)), mean(RandomFloats(dim, 2)) {
    parameters = {.key_dim = static_cast<uint32_t>(dim),
                  .value_dim = static_cast<uint32_t>(dim),
                  .key_rotation = matrix.data(),
                  .value_rotation = matrix.data(),
                  .key_mean = mean.data()};
  }
  std::vector<float> matrix;
  std::vector<float> mean;
  HeadParameters parameters;
};

enum class Op { kKeys, kValues, kQueries, kOutputs };

// [num_rows, dim] and beside each element the sum of its terms' sizes, which bounds rounding.
struct Expected {
  std::vector<double> value;
  std::vector<double> size;
};

Expected Formula(Op op, const Head& head, const std::vector<float>& rows) {
  const size_t dim = head.parameters.key_dim;
  Expected expected;
  for (size_t at = 0; at < rows.size(); ++at) {
    const size_t row = at / dim;
    const size_t column = at % dim;
    double value = 0;
    double size = 0;
    for (size_t k = 0; k < dim; ++k) {
      const double x = double{rows[row * dim + k]} - (op == Op::kKeys ? double{head.mean[k]} : 0.0);
      const double r = head.matrix[op == Op::kOutputs ? column * dim + k : k * dim + column];
      value += x * r;
      size += std::abs(x * r);
    }
    expected.value.push_back(value);
    expected.size.push_back(size);
  }
  return expected;
}

std::vector<float> Apply(Op op, const Head& head, const std::vector<float>& rows, CpuPath path) {
  std::vector<float> out(rows.size(), std::nanf(""));
  std::vector<BFloat16> narrow(rows.size(), BFloat16{0x7fc0});
  switch (op) {
    case Op::kKeys:
      RotateKeys(head.parameters, rows, narrow, path);
      break;
    case Op::kValues:
      RotateValues(head.parameters, rows, narrow, path);
      break;
    case Op::kQueries:
      RotateQueries(head.parameters, rows, out, path);
      return out;
    case Op::kOutputs:
      UnrotateOutputs(head.parameters, rows, out, path);
      return out;
  }
  for (size_t at = 0; at < out.size(); ++at) {
    out[at] = narrow[at].ToFloat();
  }
  return out;
}

class RotateTest : public testing::TestWithParam<std::tuple<CpuPath, uint32_t>> {
 protected:
  void SetUp() override {
    if (!CpuPathAvailable(path())) {
      GTEST_SKIP() << "this processor has no " << CpuPathName(path());
    }
  }
  static CpuPath path() { return std::get<0>(GetParam()); }
  static size_t dim() { return std::get<1>(GetParam()); }

  // For the first n of the same rows, for each n of `counts`, which ascend.
  static void ExpectFormula(Op op, const std::vector<size_t>& counts) {
    const Head head(dim());
    const std::vector<float> all = RandomFloats(counts.back() * dim(), 3);
    const Expected expected = Formula(op, head, all);
    const bool narrow = op == Op::kKeys || op == Op::kValues;
    for (const size_t num_rows : counts) {
      const std::vector<float> rows(all.begin(),
                                    all.begin() + static_cast<ptrdiff_t>(num_rows * dim()));
      const std::vector<float> actual = Apply(op, head, rows, path());
      for (size_t at = 0; at < actual.size(); ++at) {
        // dim additions in float, each off by half a unit of at most the sum of sizes; then
        // bfloat16's eight bits.
        const double tolerance = expected.size[at] * static_cast<double>(dim()) * 0x1p-24 +
                                 (narrow ? std::abs(expected.value[at]) * 0x1p-8 : 0.0);
        if (!(std::abs(double{actual[at]} - expected.value[at]) <= tolerance)) {
          FAIL() << "op " << static_cast<int>(op) << ", row " << at / dim() << " of " << num_rows
                 << ", column " << at % dim() << ": " << actual[at] << " is not within "
                 << tolerance << " of " << expected.value[at];
        }
      }
    }
  }
};

// Up to two whole blocks of the widest tile, so that each tile height and each split occurs; and a
// page. Few rows where the matrix is large: the tiles are the same.
TEST_P(RotateTest, EachNumberOfRowsGivesTheFormula) {
  std::vector<size_t> counts(dim() <= 128 ? 31 : 6);
  std::iota(counts.begin(), counts.end(), size_t{0});
  counts.push_back(dim() <= 256 ? kPageTokens : 15);
  for (const Op op : {Op::kKeys, Op::kValues, Op::kQueries, Op::kOutputs}) {
    ExpectFormula(op, counts);
  }
}

TEST_P(RotateTest, UnalignedRowsAreRead) {
  const Head head(dim());
  const std::vector<float> rows = RandomFloats(3 * dim() + 1, 4);
  std::vector<float> out(3 * dim() + 1);
  std::vector<float> aligned_out(3 * dim());
  const std::vector<float> aligned(rows.begin() + 1, rows.end());
  RotateQueries(head.parameters, std::span(rows).subspan(1), std::span(out).subspan(1), path());
  RotateQueries(head.parameters, aligned, aligned_out, path());
  EXPECT_THAT(std::span(out).subspan(1), testing::ElementsAreArray(aligned_out));
}

TEST_P(RotateTest, NanAndInfinityStayVisible) {
  Head head(dim());
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    std::vector<float> rows(2 * dim(), 1.0F);
    rows[dim() + 5] = bad;
    std::vector<BFloat16> out(rows.size());
    RotateKeys(head.parameters, rows, out, path());
    for (size_t at = 0; at < rows.size(); ++at) {
      EXPECT_EQ(out[at].IsFinite(), at < dim()) << at;
    }
  }
}

TEST_P(RotateTest, RoundsToBfloat16AsTheScalarFunction) {
  Head head(dim());
  std::fill(head.matrix.begin(), head.matrix.end(), 0.0F);
  for (size_t k = 0; k < dim(); ++k) {
    head.matrix[k * dim() + k] = 1;
  }
  // Ties to even and to odd, the carry into the exponent, the smallest and the largest numbers.
  std::vector<float> rows;
  for (const uint32_t word :
       {0x3f800000u, 0x3f808000u, 0x3f818000u, 0x3f808001u, 0x3f807fffu, 0x3fffffffu, 0x7f7fffffu,
        0xbf808000u, 0x00000001u, 0x80000000u, 0x00008000u, 0x00018000u}) {
    rows.push_back(std::bit_cast<float>(word));
  }
  rows.resize(dim());
  std::vector<BFloat16> out(rows.size());
  RotateValues(head.parameters, rows, out, path());
  for (size_t at = 0; at < rows.size(); ++at) {
    // The largest number times the zeros beside it is still zero; only -0 + 0 loses its sign.
    const uint16_t expected = rows[at] == 0 ? 0 : BFloat16::FromFloat(rows[at]).bits;
    EXPECT_EQ(out[at].bits, expected) << rows[at];
  }
}

INSTANTIATE_TEST_SUITE_P(PathsAndDims,
                         RotateTest,
                         testing::Combine(testing::Values(CpuPath::kReference,
                                                          CpuPath::kPortable,
                                                          CpuPath::kAvx2,
                                                          CpuPath::kAvx512),
                                          testing::Values(32, 64, 96, 128, 256, 512)),
                         [](const auto& instance) {
                           return std::string(CpuPathName(std::get<0>(instance.param))) + "_" +
                                  std::to_string(std::get<1>(instance.param));
                         });

TEST(CpuPathTest, ReferenceAndPortableRunEverywhere) {
  EXPECT_TRUE(CpuPathAvailable(CpuPath::kReference));
  EXPECT_TRUE(CpuPathAvailable(CpuPath::kPortable));
  EXPECT_TRUE(CpuPathAvailable(BestCpuPath()));
}

// A child, since the environment is read once a process.
TEST(CpuPathDeathTest, TheEnvironmentChoosesThePath) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  const auto report = [](const char* wish) {
    setenv("CRUMB_CPU_PATH", wish, 1);  // NOLINT(concurrency-mt-unsafe)
    std::fprintf(stderr, "path %s", std::string(CpuPathName(BestCpuPath())).c_str());
    std::_Exit(0);
  };
  EXPECT_EXIT(report("reference"), testing::ExitedWithCode(0), "path reference");
  EXPECT_EXIT(report("portable"), testing::ExitedWithCode(0), "path portable");
  EXPECT_EXIT(report("abacus"), testing::ExitedWithCode(0), "path (portable|avx2|avx512)");
}

}  // namespace
}  // namespace crumb
