// SPDX-License-Identifier: Apache-2.0
//
// Lanes of demotion on the pretended GPU: what they do when the device refuses a call.
#include "daemon/demote/gpu_demoter.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "gtest/gtest.h"

#include "crumb/cuda/demote.h"
#include "proto/base/bfloat16.h"
#include "proto/base/crc32c.h"
#include "proto/base/status_macros.h"
#include "tests/support/fake_gpu.h"
#include "tests/support/test_profile.h"

namespace crumb {
namespace {

constexpr HeadRange kHeads{1, 2};  // Of three.
constexpr uint32_t kLanes = 2;
constexpr CopyPlace kPlace{.segment = 0, .offset = 4096};

class GpuDemoterTest : public testing::Test {
 protected:
  GpuDemoterTest() {
    std::mt19937 random(4);
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < rows_.size(); i += sizeof(BFloat16)) {
      const BFloat16 value = BFloat16::FromFloat(normal(random));
      std::memcpy(&rows_[i], &value, sizeof(value));
    }
    EXPECT_TRUE(DemotePage(*profile_, kHeads, 0, rows_, expected_).ok());
  }
  std::span<const std::byte> RowsOfHead(uint32_t index) const {
    const size_t bytes = rows_.size() / kHeads.count;
    return std::span<const std::byte>(rows_).subspan(index * bytes, bytes);
  }
  absl::Status Demote(GpuDemoter* demoter, bool holds_rows = false) {
    CRUMB_ASSIGN_OR_RETURN(
        const std::unique_ptr<DeviceDemoter::Lane> lane,
        demoter->Open(*profile_, {.heads = kHeads, .rows_are_rotated = true, .copy = kPlace}));
    for (uint32_t index = 0; index < kHeads.count; ++index) {
      if (holds_rows) {
        CRUMB_RETURN_IF_ERROR(
            lane->SendHeld(index, RowsOfHead(index), Crc32c(RowsOfHead(index)) + announced_error_));
      } else {
        std::copy(RowsOfHead(index).begin(), RowsOfHead(index).end(), lane->Rows(index).begin());
        CRUMB_RETURN_IF_ERROR(lane->Send(index));
      }
    }
    return lane->Finish(int2_, checksums_);
  }
  void ExpectDemoted(const GpuTier& tier) const {
    EXPECT_EQ(int2_, expected_);
    EXPECT_TRUE(std::equal(expected_.begin(), expected_.end(), tier.Address(kPlace)));
    const size_t bytes = expected_.size() / kHeads.count;
    for (uint32_t index = 0; index < kHeads.count; ++index) {
      EXPECT_EQ(checksums_[index], Crc32c({expected_.data() + index * bytes, bytes}));
    }
  }

  const std::shared_ptr<const Profile> profile_ = MakeTestProfile(
      {.geometry = {.num_layers = 2, .num_kv_heads = 3, .key_dim = 64, .value_dim = 64}});
  const size_t head_bytes_ = profile_->geometry().HeadRangeBytes(PageEncoding::kBf16);
  std::vector<std::byte> rows_ = std::vector<std::byte>(kHeads.count * head_bytes_);
  std::vector<std::byte> int2_ = std::vector<std::byte>(
      kHeads.count * profile_->geometry().HeadRangeBytes(PageEncoding::kInt2));
  std::vector<std::byte> expected_ = int2_;
  std::vector<uint32_t> checksums_ = std::vector<uint32_t>(kHeads.count);
  uint32_t announced_error_ = 0;
  const std::unique_ptr<GpuTier> tier_ = *GpuTier::Create(
      {.device = 0, .capacity_bytes = size_t{2} << 20, .segment_bytes = size_t{2} << 20});
};

TEST_F(GpuDemoterTest, DemoterThatCannotBeMadeLeavesNothingBehind) {
  const size_t before = FakeGpu::allocated_bytes();
  const uint64_t num_calls = FakeGpu::FailEachCall(
      [&] { return GpuDemoter::Create(*tier_, kLanes).status(); },
      [&](const absl::Status& status) {
        EXPECT_TRUE(status.ok() || absl::IsResourceExhausted(status)) << status;
        EXPECT_EQ(FakeGpu::allocated_bytes(), before) << status;
      });
  EXPECT_GE(num_calls, 7 * kLanes);
}

TEST_F(GpuDemoterTest, LaneThatFailsAnywhereComesBackAndTheNextPageIsDemoted) {
  for (const bool holds_rows : {false, true}) {
    const auto demoter = *GpuDemoter::Create(*tier_, kLanes);
    const uint64_t num_calls = FakeGpu::FailEachCall(
        [&] { return Demote(demoter.get(), holds_rows); },
        [&](const absl::Status& status) {
          EXPECT_TRUE(status.ok() || absl::IsResourceExhausted(status)) << status;
          // The page's place in the tier, and the engine's rows, are others' from now on.
          EXPECT_EQ(FakeGpu::num_waiting(), 0u) << status;
        });
    EXPECT_GT(num_calls, 10u);
    ExpectDemoted(*tier_);
    // None was lost.
    std::vector<std::unique_ptr<DeviceDemoter::Lane>> lanes;
    for (uint32_t i = 0; i < kLanes; ++i) {
      auto lane = demoter->Open(*profile_, {.heads = kHeads});
      ASSERT_TRUE(lane.ok()) << lane.status();
      lanes.push_back(*std::move(lane));
    }
    EXPECT_EQ(demoter->Open(*profile_, {.heads = kHeads}).status().code(),
              absl::StatusCode::kResourceExhausted);
  }
}

TEST_F(GpuDemoterTest, RowsThatAreNotWhatTheyShouldBeAreLeftToTheCpuAndTheNextAreFine) {
  const auto demoter = *GpuDemoter::Create(*tier_, kLanes);
  announced_error_ = 1;
  EXPECT_EQ(Demote(demoter.get(), /*holds_rows=*/true).code(), absl::StatusCode::kAborted);
  announced_error_ = 0;
  const std::vector<std::byte> good = rows_;
  const BFloat16 bad = BFloat16::FromFloat(std::numeric_limits<float>::infinity());
  std::memcpy(&rows_[head_bytes_ + 100], &bad, sizeof(bad));
  EXPECT_EQ(Demote(demoter.get()).code(), absl::StatusCode::kInvalidArgument);
  rows_ = good;
  const absl::Status status = Demote(demoter.get());
  ASSERT_TRUE(status.ok()) << status;
  ExpectDemoted(*tier_);
}

TEST_F(GpuDemoterTest, MemoryIsHeldUpToTheBoundAndComesFree) {
  const auto demoter = *GpuDemoter::Create(*tier_, kLanes);
  // Only looked at by its size: nothing registers it really.
  const std::span<const std::byte> most(rows_.data(), GpuDemoter::kMaxHeldBytes);
  auto hold = demoter->Hold(most);
  EXPECT_NE(hold, nullptr);
  EXPECT_EQ(demoter->Hold(rows_), nullptr);
  hold = nullptr;
  EXPECT_NE(demoter->Hold(rows_), nullptr);
  FakeGpu::FailEachCall(
      [&] {
        demoter->Hold(rows_);
        return absl::OkStatus();
      },
      [](const absl::Status&) {});
  EXPECT_NE(demoter->Hold(most), nullptr) << "what was not held counts for nothing";
}

}  // namespace
}  // namespace crumb
