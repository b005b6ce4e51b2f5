// SPDX-License-Identifier: Apache-2.0
//
// Rotation on one core beside the machine's single-precision matrix product (Eigen, 768^3, one
// thread): multiply-adds/s of both, measured in turns in one run.
#include <algorithm>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"

#include "bench/support/figure.h"
#include "bench/support/matrix_product.h"
#include "bench/support/thread_clock.h"
#include "crumb/cuda/rotate.h"

namespace {

using crumb::BFloat16;
using crumb::CpuPath;

constexpr int kRounds = 15;

struct Case {
  std::string name;
  double multiply_adds = 0;  // A call.
  bool promised = false;     // To reach half of the yardstick.
  std::function<void()> call;
  std::vector<double> rates = {};  // Multiply-adds/s, one a round.
};

// Calls for about 5 ms: long against the clock, short against the neighbours' bursts.
double MeasureRate(const Case& measured) {
  size_t calls = 0;
  const double start = crumb::bench::ThreadSeconds();
  double elapsed = 0;
  do {
    measured.call();
    ++calls;
    elapsed = crumb::bench::ThreadSeconds() - start;
  } while (elapsed < 0.005);
  return static_cast<double>(calls) * measured.multiply_adds / elapsed;
}

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

struct Buffers {
  explicit Buffers(uint32_t dim)
      : matrix(size_t{dim} * dim),
        mean(dim),
        rows(size_t{64} * dim),
        out(rows.size()),
        narrow(rows.size()) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (auto* values : {&matrix, &mean, &rows}) {
      std::generate(values->begin(), values->end(), [&] { return normal(random); });
    }
    head = {.key_dim = dim,
            .value_dim = dim,
            .key_rotation = matrix.data(),
            .value_rotation = matrix.data(),
            .key_mean = mean.data()};
  }
  std::vector<float> matrix;
  std::vector<float> mean;
  std::vector<float> rows;
  std::vector<float> out;
  std::vector<BFloat16> narrow;
  crumb::HeadParameters head;
};

// One row is a decode step's, 64 are a page's.
void AddCases(Buffers* buffers, CpuPath path, std::vector<Case>* cases) {
  const uint32_t dim = buffers->head.key_dim;
  for (const size_t num_rows : {size_t{1}, size_t{64}}) {
    const std::string suffix =
        absl::StrFormat("/%s/d=%d/rows=%d", std::string(crumb::CpuPathName(path)), dim, num_rows);
    const size_t size = num_rows * dim;
    const double multiply_adds = static_cast<double>(size) * dim;
    const bool promised = path == crumb::BestCpuPath() && num_rows == 64;
    cases->push_back({"RotateKeys" + suffix, multiply_adds, promised, [=] {
                        crumb::RotateKeys(buffers->head, std::span(buffers->rows).first(size),
                                          std::span(buffers->narrow).first(size), path);
                      }});
    cases->push_back({"UnrotateOutputs" + suffix, multiply_adds, promised, [=] {
                        crumb::UnrotateOutputs(buffers->head, std::span(buffers->rows).first(size),
                                               std::span(buffers->out).first(size), path);
                      }});
  }
}

// Every path at the usual head_dim; the one that this machine would choose at the others.
std::vector<Case> AllCases(std::vector<Buffers>* buffers) {
  std::vector<Case> cases;
  for (Buffers& of_dim : *buffers) {
    of_dim.head.key_rotation = of_dim.head.value_rotation = of_dim.matrix.data();
    of_dim.head.key_mean = of_dim.mean.data();
    for (const CpuPath path : {CpuPath::kPortable, CpuPath::kAvx2, CpuPath::kAvx512}) {
      if (crumb::CpuPathAvailable(path) &&
          (of_dim.head.key_dim == 128 || path == crumb::BestCpuPath())) {
        AddCases(&of_dim, path, &cases);
      }
    }
  }
  return cases;
}

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  crumb::bench::MatrixProduct yardstick;
  std::vector<double> yardstick_rates;
  std::vector<Buffers> buffers;
  for (const uint32_t dim : {64U, 128U, 256U}) {
    buffers.emplace_back(dim);
  }
  std::vector<Case> cases = AllCases(&buffers);
  for (int round = 0; round < kRounds; ++round) {
    yardstick_rates.push_back(yardstick.MeasureRate());
    for (Case& measured : cases) {
      measured.rates.push_back(MeasureRate(measured));
    }
  }
  const double limit = Median(yardstick_rates) / 1e9;
  for (const Case& measured : cases) {
    crumb::bench::Register(measured.name, {.value = Median(measured.rates) / 1e9,
                                           .limit = limit,
                                           .target = measured.promised ? limit / 2 : 0,
                                           .unit = "GMAC/s",
                                           .limit_name = yardstick.name()});
  }
  benchmark::RunSpecifiedBenchmarks();
}
