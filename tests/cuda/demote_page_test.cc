// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <limits>
#include <memory>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "crumb/cuda/demote.h"
#include "crumb/cuda/rotate.h"
#include "tests/cuda/codec_testing.h"

namespace crumb {
namespace {

using testing::HasSubstr;

constexpr uint32_t kLayers = 3;
constexpr uint32_t kHeads = 2;
constexpr uint32_t kKeyDim = 64;
constexpr uint32_t kValueDim = 32;

// Rows of a Hadamard matrix, with signs of their own for each head.
std::vector<float> Rotations(uint32_t dim) {
  std::vector<float> all;
  for (uint32_t head = 0; head < kLayers * kHeads; ++head) {
    for (uint32_t i = 0; i < dim; ++i) {
      for (uint32_t j = 0; j < dim; ++j) {
        const int parity = __builtin_popcount(i & j) + __builtin_popcount(i & (head + 1));
        all.push_back((parity % 2 == 0 ? 1.0f : -1.0f) / std::sqrt(static_cast<float>(dim)));
      }
    }
  }
  return all;
}

std::shared_ptr<const Profile> MakeProfile() {
  ProfileParts parts;
  parts.model = "test";
  parts.geometry = {kLayers, kHeads, kKeyDim, kValueDim};
  parts.codec = CodecId::kOscarInt2;
  parts.key_rotation = Rotations(kKeyDim);
  parts.value_rotation = Rotations(kValueDim);
  for (uint32_t i = 0; i < kLayers * kHeads; ++i) {
    parts.key_clip.push_back(0.9f + 0.01f * static_cast<float>(i));
    parts.value_clip.push_back(0.99f - 0.01f * static_cast<float>(i));
  }
  for (uint32_t i = 0; i < kLayers * kHeads * kKeyDim; ++i) {
    parts.key_mean.push_back(static_cast<float>(i % 5));
  }
  auto file = Profile::Serialize(parts);
  EXPECT_TRUE(file.ok()) << file.status();
  auto profile = Profile::Parse(*std::move(file));
  EXPECT_TRUE(profile.ok()) << profile.status();
  return *std::move(profile);
}

class DemotePageTest : public testing::Test {
 protected:
  // BF16 head blocks of `num_heads` heads, as bytes.
  std::vector<BFloat16> Image(uint32_t num_heads) const {
    return GaussianRows(size_t{num_heads} * kLayers * kPageTokens * (kKeyDim + kValueDim), 1, 3);
  }
  static std::span<const std::byte> Bytes(const std::vector<BFloat16>& rows) {
    return std::as_bytes(std::span(rows));
  }

  const std::shared_ptr<const Profile> profile_ = MakeProfile();
  const size_t block_bytes_ = profile_->geometry().Int2Block().bytes();
  static constexpr size_t kBlockElements = size_t{kPageTokens} * (kKeyDim + kValueDim);
};

TEST_F(DemotePageTest, DemotesEachHeadBlockWithItsOwnParameters) {
  const auto image = Image(kHeads);
  std::vector<std::byte> page(profile_->geometry().PageBytes(PageEncoding::kInt2));
  ASSERT_TRUE(DemotePage(*profile_, {0, kHeads}, 640, Bytes(image), page).ok());
  for (uint32_t head = 0; head < kHeads; ++head) {
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      const size_t block = size_t{head} * kLayers + layer;
      const auto keys = std::span(image).subspan(block * kBlockElements, kPageTokens * kKeyDim);
      const auto values = std::span(image).subspan(block * kBlockElements + kPageTokens * kKeyDim,
                                                   kPageTokens * kValueDim);
      std::vector<std::byte> expected(block_bytes_);
      ASSERT_TRUE(DemoteHeadBlock(profile_->head(layer, head), keys, values, expected).ok());
      const auto got = std::span(page).subspan(block * block_bytes_, block_bytes_);
      EXPECT_TRUE(std::equal(got.begin(), got.end(), expected.begin()))
          << "layer " << layer << ", head " << head;
    }
  }
}

TEST_F(DemotePageTest, TakesARunOfHeads) {
  const auto image = Image(kHeads);
  std::vector<std::byte> whole(kHeads * kLayers * block_bytes_);
  ASSERT_TRUE(DemotePage(*profile_, {0, kHeads}, 0, Bytes(image), whole).ok());
  std::vector<std::byte> second(kLayers * block_bytes_);
  const auto half = Bytes(image).subspan(Bytes(image).size() / 2);
  ASSERT_TRUE(DemotePage(*profile_, {1, 1}, 0, half, second).ok());
  EXPECT_TRUE(std::equal(second.begin(), second.end(),
                         whole.begin() + static_cast<ptrdiff_t>(whole.size() / 2)));
}

TEST_F(DemotePageTest, RefusesNanNamingLayerHeadAndPosition) {
  auto image = Image(1);
  // Layer 2 of head 1: V of token 5 of the page, channel 9.
  image[2 * kBlockElements + kPageTokens * kKeyDim + 5 * kValueDim + 9] = BFloat16{0x7fc0};
  std::vector<std::byte> page(kLayers * block_bytes_);
  const auto status = DemotePage(*profile_, {1, 1}, 640, Bytes(image), page);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("V holds nan at layer 2, KV head 1, token 645, channel 9"));
}

TEST_F(DemotePageTest, RotatesEachHeadBlockWithItsOwnParameters) {
  const auto plain = Image(kHeads);
  std::vector<BFloat16> stored(plain.size());
  ASSERT_TRUE(
      RotatePage(*profile_, {0, kHeads}, 0, Bytes(plain), std::as_writable_bytes(std::span(stored)))
          .ok());
  for (uint32_t head = 0; head < kHeads; ++head) {
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      const size_t first = (size_t{head} * kLayers + layer) * kBlockElements;
      std::vector<float> keys;
      for (size_t i = 0; i < kPageTokens * kKeyDim; ++i) {
        keys.push_back(plain[first + i].ToFloat());
      }
      std::vector<BFloat16> expected(keys.size());
      RotateKeys(profile_->head(layer, head), keys, expected);
      EXPECT_TRUE(std::equal(expected.begin(), expected.end(),
                             stored.begin() + static_cast<ptrdiff_t>(first)))
          << "layer " << layer << ", head " << head;
    }
  }
}

TEST_F(DemotePageTest, RotationRefusesWhatIsNotFiniteBeforeAndAfter) {
  auto plain = Image(1);
  std::vector<BFloat16> stored(plain.size());
  const auto bytes = std::as_writable_bytes(std::span(stored));
  plain[7] = BFloat16::FromFloat(-std::numeric_limits<float>::infinity());
  auto status = RotatePage(*profile_, {0, 1}, 64, Bytes(plain), bytes);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("K holds -inf at layer 0, KV head 0, token 64, channel 7"));

  // Finite, but their sum is not.
  for (uint32_t channel = 0; channel < kKeyDim; ++channel) {
    plain[kKeyDim + channel] = BFloat16::FromFloat(3e38f);
  }
  plain[7] = BFloat16{};
  status = RotatePage(*profile_, {0, 1}, 64, Bytes(plain), bytes);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("layer 0, KV head 0, token 65"));
}

}  // namespace
}  // namespace crumb
