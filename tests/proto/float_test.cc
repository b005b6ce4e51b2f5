// SPDX-License-Identifier: Apache-2.0
//
// bfloat16 and binary16: every value there and back, and rounding against the nearest of all
// values.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "proto/base/bfloat16.h"
#include "proto/base/float16.h"

namespace crumb {
namespace {

// All finite values, negative to positive, and the rule of IEEE 754 for what lies between.
template <typename Narrow>
class Rounding {
 public:
  Rounding() {
    for (uint32_t bits = 0; bits < 0x8000; ++bits) {
      const float value = Narrow{static_cast<uint16_t>(bits)}.ToFloat();
      if (std::isfinite(value)) {
        values_.push_back(value);
      }
    }
  }

  // Of a finite value, sign apart: the index of the nearest, an even one of two that are as near;
  // one past the last beyond the range.
  size_t Nearest(float value) const {
    const double size = std::abs(double{value});
    const auto above = std::lower_bound(values_.begin(), values_.end(), size);
    const auto high = static_cast<size_t>(above - values_.begin());
    if (high == 0) {
      return 0;
    }
    const double low_value = values_[high - 1];
    const double high_value = high < values_.size()
                                  ? double{values_[high]}
                                  : 2 * low_value - double{values_[values_.size() - 2]};
    const double middle = (low_value + high_value) / 2;
    if (size == middle) {
      return high % 2 == 0 ? high : high - 1;
    }
    return size < middle ? high - 1 : high;
  }

 private:
  std::vector<float> values_;
};

template <typename Narrow>
class NarrowFloatTest : public testing::Test {
 protected:
  static uint16_t Bits(float value) { return Narrow::FromFloat(value).bits; }
  const Rounding<Narrow> rounding_;
};
using NarrowFloats = testing::Types<BFloat16, Float16>;
TYPED_TEST_SUITE(NarrowFloatTest, NarrowFloats);

TYPED_TEST(NarrowFloatTest, EveryValueComesBack) {
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const TypeParam narrow{static_cast<uint16_t>(bits)};
    const float wide = narrow.ToFloat();
    if (std::isnan(wide)) {
      ASSERT_TRUE(std::isnan(TypeParam::FromFloat(wide).ToFloat())) << bits;
    } else {
      ASSERT_EQ(this->Bits(wide), bits);
    }
  }
}

TYPED_TEST(NarrowFloatTest, RoundsToTheNearestAndTiesToEven) {
  std::mt19937 random(1);
  for (int round = 0; round < 300'000; ++round) {
    uint32_t word = static_cast<uint32_t>(random());
    // Half of them on a tie or next to one.
    if (round % 2 == 0) {
      const uint32_t step = std::is_same_v<TypeParam, BFloat16> ? 0x8000 : 0x1000;
      word = (word & ~(2 * step - 1)) + step + static_cast<uint32_t>(random() % 3) - 1;
    }
    const auto value = std::bit_cast<float>(word);
    if (!std::isfinite(value)) {
      continue;
    }
    const auto expected =
        static_cast<uint16_t>(this->rounding_.Nearest(value) | (std::signbit(value) ? 0x8000 : 0));
    ASSERT_EQ(this->Bits(value), expected) << "value " << value << ", word " << word;
  }
}

TYPED_TEST(NarrowFloatTest, NanStaysQuietAndSigned) {
  for (const uint32_t word : {0x7f800001U, 0x7fc00000U, 0xffffffffU, 0xff800001U}) {
    const TypeParam narrow = TypeParam::FromFloat(std::bit_cast<float>(word));
    EXPECT_TRUE(std::isnan(narrow.ToFloat())) << word;
    EXPECT_EQ(narrow.bits >> 15, word >> 31);
    // The quiet bit is the first of the fraction.
    EXPECT_NE(std::bit_cast<uint32_t>(narrow.ToFloat()) & 0x00400000U, 0U);
  }
}

TYPED_TEST(NarrowFloatTest, InfinityStays) {
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(TypeParam::FromFloat(infinity).ToFloat(), infinity);
  EXPECT_EQ(TypeParam::FromFloat(-infinity).ToFloat(), -infinity);
}

TEST(BFloat16Test, IsFiniteForAllButInfinityAndNan) {
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const BFloat16 narrow{static_cast<uint16_t>(bits)};
    ASSERT_EQ(narrow.IsFinite(), std::isfinite(narrow.ToFloat())) << bits;
  }
}

TEST(Float16Test, SaturatesInsteadOfOverflowing) {
  EXPECT_EQ(Float16::FromFloatSaturated(1e30F).ToFloat(), 65504.0F);
  EXPECT_EQ(Float16::FromFloatSaturated(-1e30F).ToFloat(), -65504.0F);
  EXPECT_EQ(Float16::FromFloatSaturated(65519.0F).ToFloat(), 65504.0F);
  EXPECT_EQ(Float16::FromFloatSaturated(-std::numeric_limits<float>::infinity()).ToFloat(),
            -65504.0F);
  EXPECT_EQ(Float16::FromFloatSaturated(1.5F).ToFloat(), 1.5F);
}

TEST(AllFiniteTest, FindsTheOneValueThatIsNotWhereverItIs) {
  std::vector<BFloat16> values;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    if (const BFloat16 value{static_cast<uint16_t>(bits)}; value.IsFinite()) {
      values.push_back(value);
    }
  }
  EXPECT_TRUE(AllFinite(values.data(), values.size()));
  EXPECT_TRUE(AllFinite(nullptr, 0));
  for (const uint16_t bits :
       std::initializer_list<uint16_t>{0x7f80, 0xff80, 0x7f81, 0xffff, 0x7fff}) {
    for (const size_t at : {size_t{0}, size_t{1}, size_t{31}, size_t{64}, values.size() - 1}) {
      const BFloat16 kept = std::exchange(values[at], BFloat16{bits});
      EXPECT_FALSE(AllFinite(values.data(), values.size())) << bits << " at " << at;
      values[at] = kept;
    }
  }
}

}  // namespace
}  // namespace crumb
