// SPDX-License-Identifier: Apache-2.0
//
// The tier of copies on the pretended GPU: what it does when the device refuses a call.
#include "daemon/tier/gpu_tier.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "proto/base/crc32c.h"
#include "tests/support/fake_gpu.h"

namespace crumb {
namespace {

using testing::HasSubstr;

constexpr size_t kSegmentBytes = size_t{2} << 20;
constexpr size_t kRangeBytes = 1024;
constexpr uint32_t kRanges = 2;
// More than are checked in one go.
constexpr size_t kCopies = 70;

class GpuTierTest : public testing::Test {
 protected:
  static absl::StatusOr<std::unique_ptr<GpuTier>> Make() {
    return GpuTier::Create(
        {.device = 0, .capacity_bytes = 3 * kSegmentBytes, .segment_bytes = kSegmentBytes});
  }
  // Of memory that must stay until Write returns, and no longer.
  std::vector<PageCopy> Copies() {
    std::vector<PageCopy> copies;
    for (size_t i = 0; i < kCopies; ++i) {
      PageCopy copy{.place = {.segment = 1, .offset = i * kRanges * kRangeBytes},
                    .source = std::span<const std::byte>(source_).subspan(i * kRanges * kRangeBytes,
                                                                          kRanges * kRangeBytes),
                    .head_crc32c = {}};
      for (uint32_t range = 0; range < kRanges; ++range) {
        copy.head_crc32c.push_back(Crc32c(copy.source.subspan(range * kRangeBytes, kRangeBytes)));
      }
      copies.push_back(std::move(copy));
    }
    return copies;
  }
  void SetUp() override {
    for (size_t i = 0; i < source_.size(); ++i) {
      source_[i] = static_cast<std::byte>(i * 5 / 3);
    }
  }

  std::vector<std::byte> source_ = std::vector<std::byte>(kCopies * kRanges * kRangeBytes);
};

TEST_F(GpuTierTest, TierThatCannotBeMadeLeavesNothingBehind) {
  const size_t before = FakeGpu::allocated_bytes();
  const uint64_t num_calls = FakeGpu::FailEachCall(
      [] { return Make().status(); },
      [&](const absl::Status& status) {
        EXPECT_TRUE(status.ok() || absl::IsResourceExhausted(status)) << status;
        EXPECT_EQ(FakeGpu::allocated_bytes(), before) << status;
      });
  EXPECT_GE(num_calls, 6u) << "device, stream, memory and three segments";
}

TEST_F(GpuTierTest, GeometryWithoutKernelsIsNamed) {
  const auto tier = *Make();
  for (const uint32_t dim : {64u, 128u, 256u}) {
    EXPECT_TRUE(tier->CheckGeometry({2, 2, dim, dim}).ok()) << dim;
  }
  for (const Geometry& geometry : {Geometry{2, 2, 96, 96}, Geometry{2, 2, 64, 128}}) {
    const absl::Status status = tier->CheckGeometry(geometry);
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("kernels for 64, 128 and 256"));
  }
}

TEST_F(GpuTierTest, WriteThatFailsHasEndedWhenItReturnsAndTheNextOneArrives) {
  const auto tier = *Make();
  const uint64_t num_calls = FakeGpu::FailEachCall(
      [&] {
        absl::Status first;
        for (const absl::Status& status : tier->Write(Copies())) {
          first.Update(status);
        }
        return first;
      },
      [&](const absl::Status& status) {
        EXPECT_TRUE(status.ok() || absl::IsResourceExhausted(status)) << status;
        // Its places are somebody else's from now on.
        EXPECT_EQ(FakeGpu::num_waiting(), 0u) << status;
        if (status.ok()) {
          EXPECT_TRUE(std::equal(source_.begin(), source_.end(),
                                 tier->Address({.segment = 1, .offset = 0})));
        }
      });
  EXPECT_GT(num_calls, kCopies);
}

TEST_F(GpuTierTest, CopyWithAnotherChecksumIsNamedAndTheOthersAreThere) {
  const auto tier = *Make();
  std::vector<PageCopy> copies = Copies();
  copies[65].head_crc32c[1] ^= 1;
  const auto statuses = tier->Write(copies);
  ASSERT_EQ(statuses.size(), kCopies);
  for (size_t i = 0; i < kCopies; ++i) {
    EXPECT_EQ(statuses[i].code(), i == 65 ? absl::StatusCode::kDataLoss : absl::StatusCode::kOk)
        << i;
  }
  EXPECT_THAT(std::string(statuses[65].message()), HasSubstr("range 1 has checksum"));
}

TEST_F(GpuTierTest, SegmentWithoutFreshMemoryIsRenewedByALaterCall) {
  const auto tier = *Make();
  for (const absl::Status& status : tier->Write(Copies())) {
    ASSERT_TRUE(status.ok()) << status;
  }
  FakeGpu::FailEachCall([&] { return tier->Renew(1); },
                        [](const absl::Status& status) {
                          EXPECT_TRUE(status.ok() || absl::IsResourceExhausted(status)) << status;
                        });
  const std::byte* const data = tier->Address({.segment = 1, .offset = 0});
  EXPECT_TRUE(std::all_of(data, data + kSegmentBytes, [](std::byte x) {
    return x == std::byte{0};
  })) << "what was there is nobody's to see";
  EXPECT_TRUE(tier->Share(1).ok());
}

}  // namespace
}  // namespace crumb
