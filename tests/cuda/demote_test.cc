// SPDX-License-Identifier: Apache-2.0
#include "crumb/cuda/demote.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "proto/base/crc32c.h"
#include "tests/cuda/demote_testing.h"

namespace crumb {
namespace {

using testing::ElementsAreArray;

// ---- Golden bytes, computed by demote_golden.py.

struct Golden {
  uint32_t key_dim;
  uint32_t value_dim;
  CodecId codec;
  uint32_t crc32c;
  std::array<uint8_t, 8> first_codes;
  std::array<uint8_t, 8> first_meta;
};

constexpr Golden kGolden[] = {
    {64,
     64,
     CodecId::kOscarInt2,
     0x8114922e,
     {0x44, 0xba, 0xae, 0x15, 0x14, 0x77, 0xaa, 0x9d},
     {0x25, 0x41, 0xb8, 0xc3, 0x1b, 0x41, 0xa8, 0xc3}},
    {128,
     128,
     CodecId::kOscarInt2,
     0xfc0f15b0,
     {0x44, 0xba, 0xae, 0x15, 0x14, 0x77, 0xaa, 0x9d},
     {0x1b, 0x41, 0xa8, 0xc3, 0x15, 0x41, 0xa0, 0xc3}},
    {256,
     256,
     CodecId::kOscarInt2,
     0x0073d419,
     {0x44, 0xba, 0xae, 0x15, 0x14, 0x77, 0xaa, 0x9d},
     {0x15, 0x41, 0xa0, 0xc3, 0x0b, 0x41, 0x90, 0xc3}},
    {128,
     64,
     CodecId::kOscarInt2,
     0xd1b1a997,
     {0x44, 0xba, 0xae, 0x15, 0x14, 0x77, 0xaa, 0x9d},
     {0x1b, 0x41, 0xa8, 0xc3, 0x15, 0x41, 0xa0, 0xc3}},
    {64,
     64,
     CodecId::kOscarInt2Lm,
     0x45fdcd74,
     {0x44, 0xba, 0xee, 0x11, 0x10, 0x77, 0xaa, 0x9d},
     {0xab, 0x40, 0x54, 0xc3, 0x7f, 0x40, 0x8a, 0xc2}},
    {128,
     128,
     CodecId::kOscarInt2Lm,
     0xce9e36cd,
     {0x44, 0xba, 0xee, 0x11, 0x10, 0x77, 0xaa, 0x9d},
     {0x97, 0x40, 0x3c, 0xc3, 0x8b, 0x40, 0xcb, 0xc2}},
    {256,
     256,
     CodecId::kOscarInt2Lm,
     0x5607ae0c,
     {0x44, 0xba, 0xee, 0x11, 0x10, 0x77, 0xaa, 0x9d},
     {0x82, 0x40, 0xf3, 0xc2, 0x8d, 0x40, 0xcf, 0xc2}},
    {128,
     64,
     CodecId::kOscarInt2Lm,
     0x134ba3b6,
     {0x44, 0xba, 0xee, 0x11, 0x10, 0x77, 0xaa, 0x9d},
     {0x97, 0x40, 0x3c, 0xc3, 0x8b, 0x40, 0xcb, 0xc2}},
    {64,
     64,
     CodecId::kOscarInt2Aware,
     0x4fed89c5,
     {0x44, 0xba, 0xee, 0x11, 0x14, 0x77, 0xaa, 0x9d},
     {0xeb, 0x40, 0x60, 0xc3, 0xbb, 0x40, 0x18, 0xc3}},
    {128,
     128,
     CodecId::kOscarInt2Aware,
     0x5493a65b,
     {0x44, 0xba, 0xee, 0x11, 0x14, 0x77, 0xaa, 0x9d},
     {0xe0, 0x40, 0x50, 0xc3, 0xc5, 0x40, 0x28, 0xc3}},
    {256,
     256,
     CodecId::kOscarInt2Aware,
     0x43df1e50,
     {0x44, 0xba, 0xee, 0x11, 0x14, 0x77, 0xaa, 0xad},
     {0xcb, 0x40, 0x30, 0xc3, 0xc5, 0x40, 0x28, 0xc3}},
    {128,
     64,
     CodecId::kOscarInt2Aware,
     0x62e465c0,
     {0x44, 0xba, 0xee, 0x11, 0x14, 0x77, 0xaa, 0x9d},
     {0xe0, 0x40, 0x50, 0xc3, 0xc5, 0x40, 0x28, 0xc3}},
    {64,
     64,
     CodecId::kOscarInt2Tilted,
     0x82bb091e,
     {0x44, 0xba, 0xee, 0x11, 0x14, 0x77, 0xaa, 0x9d},
     {0xed, 0x40, 0x52, 0xc3, 0x9c, 0x40, 0x17, 0xc3}},
    {128,
     128,
     CodecId::kOscarInt2Tilted,
     0x5636e067,
     {0x44, 0xba, 0xae, 0x15, 0x14, 0x77, 0xaa, 0x9d},
     {0xc1, 0x40, 0x37, 0xc3, 0xbf, 0x40, 0x57, 0xc3}},
    {256,
     256,
     CodecId::kOscarInt2Tilted,
     0x1a956041,
     {0x44, 0xba, 0xae, 0x11, 0x14, 0x77, 0xaa, 0xad},
     {0xb7, 0x40, 0x3b, 0xc3, 0xda, 0x40, 0x8f, 0xc3}},
    {128,
     64,
     CodecId::kOscarInt2Tilted,
     0xb958ab0a,
     {0x44, 0xba, 0xae, 0x15, 0x14, 0x77, 0xaa, 0x9d},
     {0xc1, 0x40, 0x37, 0xc3, 0xbf, 0x40, 0x57, 0xc3}},
};

std::vector<BFloat16> GoldenRows(uint32_t dim, uint32_t salt) {
  std::vector<BFloat16> rows;
  for (uint32_t token = 0; token < kPageTokens; ++token) {
    for (uint32_t channel = 0; channel < dim; ++channel) {
      const uint32_t mixed = token * 7919 + channel * 104729 + token * channel * 31 + salt;
      rows.push_back(BFloat16::FromFloat((static_cast<float>(mixed % 509) - 254) / 64));
    }
  }
  return rows;
}

void FillGoldenFeedback(TestHead& head) {
  const uint32_t dim = head.parameters().key_dim;
  for (uint32_t i = 0; i < dim; ++i) {
    for (uint32_t j = i; j < dim; ++j) {
      head.key_feedback()[i * dim + j] =
          i == j ? 1 + static_cast<float>(i % 7) / 8
                 : (static_cast<float>((i * 31 + j * 17) % 13) - 6) / 64;
    }
  }
}

// A metric that is not the feedback's: the formulas do not ask for it.
void FillGoldenReaders(TestHead& head) {
  const uint32_t dim = head.parameters().key_dim;
  for (uint32_t i = 0; i < dim; ++i) {
    head.query_mean()[i] = (static_cast<float>(i * 13 % 9) - 4) / 16;
    for (uint32_t j = 0; j < dim; ++j) {
      head.key_metric()[i * dim + j] = i == j ? 2 + static_cast<float>(i % 5) / 4
                                              : (static_cast<float>((i * j + i + j) % 11) - 5) / 64;
    }
  }
}

class DemoteGoldenTest : public testing::TestWithParam<Golden> {};

TEST_P(DemoteGoldenTest, EveryPathGivesTheBytesOfTheFormula) {
  const Golden& golden = GetParam();
  TestHead head(golden.key_dim, golden.value_dim, golden.codec);
  FillGoldenFeedback(head);
  FillGoldenReaders(head);
  const auto keys = GoldenRows(golden.key_dim, 0);
  const auto values = GoldenRows(golden.value_dim, 71);
  auto paths = FastPaths();
  paths.push_back(CpuPath::kReference);
  for (const CpuPath path : paths) {
    SCOPED_TRACE(CpuPathName(path));
    const auto block = MustDemote(head.parameters(), keys, values, path);
    std::array<uint8_t, 8> codes{};
    std::array<uint8_t, 8> meta{};
    std::memcpy(codes.data(), block.data(), codes.size());
    std::memcpy(meta.data(),
                block.data() + Int2HeadBlock{golden.key_dim, golden.value_dim}.key_meta_offset(),
                meta.size());
    EXPECT_THAT(codes, ElementsAreArray(golden.first_codes));
    EXPECT_THAT(meta, ElementsAreArray(golden.first_meta));
    EXPECT_EQ(Crc32c(block), golden.crc32c);
  }
}

std::string CaseName(uint32_t key_dim, uint32_t value_dim, CodecId codec) {
  const char* of_codec = codec == CodecId::kOscarInt2        ? "Nearest"
                         : codec == CodecId::kOscarInt2Lm    ? "Lm"
                         : codec == CodecId::kOscarInt2Aware ? "Aware"
                                                             : "Tilted";
  return absl::StrCat("K", key_dim, "V", value_dim, of_codec);
}

INSTANTIATE_TEST_SUITE_P(Dims, DemoteGoldenTest, testing::ValuesIn(kGolden), [](const auto& test) {
  return CaseName(test.param.key_dim, test.param.value_dim, test.param.codec);
});

// ---- All paths write the same bytes, whatever the rows.

enum class RowKind {
  kGaussian,
  kOutliers,
  kConstant,
  kTiny,
  kHuge,
  kDenormal,
  kTies,
  kSignedZeros,
  kRandomBits,
  kMixed,  // Each row of another kind.
};

float DrawElement(RowKind kind, size_t row, std::mt19937& random) {
  std::normal_distribution<float> normal(0, 1);
  const float x = normal(random);
  switch (kind) {
    case RowKind::kGaussian:
      return x;
    case RowKind::kOutliers:
      return random() % 40 == 0 ? 50 * x : x;
    case RowKind::kConstant:
      return static_cast<float>(row) * (row % 2 == 0 ? 0.125f : -0.375f);
    case RowKind::kTiny:
      return x * 3e-8f;
    case RowKind::kHuge:
      return x * 1e38f;
    case RowKind::kDenormal:
      return x * 1e-39f;
    case RowKind::kTies:  // Halves between levels: where rounding decides.
      return static_cast<float>(random() % 7) / 2 - (row % 3 == 0 ? 1.5f : 0.0f);
    case RowKind::kSignedZeros:
      return random() % 2 == 0 ? 0.0f : -0.0f;
    case RowKind::kRandomBits:
    case RowKind::kMixed:
      return BFloat16{static_cast<uint16_t>(random())}.ToFloat();
  }
  return 0;
}

std::vector<BFloat16> DrawRows(RowKind kind, uint32_t dim, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<BFloat16> rows;
  for (size_t row = 0; row < kPageTokens; ++row) {
    const RowKind of_row = kind == RowKind::kMixed ? static_cast<RowKind>(random() % 9) : kind;
    for (uint32_t channel = 0; channel < dim; ++channel) {
      BFloat16 x = BFloat16::FromFloat(DrawElement(of_row, row, random));
      if (!x.IsFinite()) {
        x.bits &= 0xbfff;
      }
      rows.push_back(x);
    }
  }
  return rows;
}

struct Shape {
  uint32_t key_dim;
  uint32_t value_dim;
};

class DemotePathsTest : public testing::TestWithParam<std::tuple<Shape, CodecId>> {
 protected:
  void ExpectPathsAgree(TestHead& head, RowKind kind, uint32_t seed) const {
    const HeadParameters& parameters = head.parameters();
    const auto keys = DrawRows(kind, parameters.key_dim, seed);
    const auto values = DrawRows(kind, parameters.value_dim, seed + 1000);
    const auto expected = MustDemote(parameters, keys, values, CpuPath::kReference);
    for (const CpuPath path : FastPaths()) {
      const auto block = MustDemote(parameters, keys, values, path);
      const auto differs = std::mismatch(block.begin(), block.end(), expected.begin());
      EXPECT_EQ(differs.first, block.end())
          << CpuPathName(path) << ", row kind " << static_cast<int>(kind) << ", seed " << seed
          << ": first difference at byte " << differs.first - block.begin();
    }
  }
};

TEST_P(DemotePathsTest, WriteTheSameBytes) {
  const auto [shape, codec] = GetParam();
  TestHead head(shape.key_dim, shape.value_dim, codec);
  for (int kind = 0; kind <= static_cast<int>(RowKind::kMixed); ++kind) {
    for (uint32_t seed = 1; seed <= 3; ++seed) {
      ExpectPathsAgree(head, static_cast<RowKind>(kind), seed);
    }
  }
}

TEST_P(DemotePathsTest, WriteTheSameBytesAtEveryClipRatio) {
  const auto [shape, codec] = GetParam();
  TestHead head(shape.key_dim, shape.value_dim, codec);
  for (const float ratio : {-1.0f, 0.0f, 0.001f, 0.5f, 0.9f, 0.92f, 0.96f, 0.999f, 1.0f}) {
    SCOPED_TRACE(ratio);
    head.parameters().key_clip = ratio;
    head.parameters().value_clip = ratio;
    ExpectPathsAgree(head, RowKind::kGaussian, 7);
    ExpectPathsAgree(head, RowKind::kMixed, 8);
  }
}

TEST_P(DemotePathsTest, WriteTheSameBytesInOtherRanges) {
  const auto [shape, codec] = GetParam();
  if (!HasFeedback(codec)) {
    GTEST_SKIP() << "keys try no ranges";
  }
  TestHead head(shape.key_dim, shape.value_dim, codec);
  for (const std::array<float, 3>& ranges :
       {std::array<float, 3>{0.96f, 0.92f, 0.86f}, std::array<float, 3>{0.5f, 1.0f, 0.001f}}) {
    head.parameters().key_ranges = ranges;
    ExpectPathsAgree(head, RowKind::kGaussian, 9);
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes,
                         DemotePathsTest,
                         testing::Combine(testing::Values(Shape{32, 32},
                                                          Shape{64, 64},
                                                          Shape{96, 96},
                                                          Shape{128, 128},
                                                          Shape{256, 256},
                                                          Shape{128, 64},
                                                          Shape{64, 160}),
                                          testing::ValuesIn(kCodecs)),
                         [](const auto& test) {
                           const Shape shape = std::get<0>(test.param);
                           return CaseName(shape.key_dim, shape.value_dim, std::get<1>(test.param));
                         });

}  // namespace
}  // namespace crumb
