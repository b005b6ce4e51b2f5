// SPDX-License-Identifier: Apache-2.0
//
// A device that demotes with the CPU's codec, and can be told to fail. For tests.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "crumb/cuda/demote.h"
#include "daemon/demote/device_demoter.h"
#include "proto/base/crc32c.h"
#include "proto/base/status_macros.h"
#include "tests/support/fake_copy_tier.h"

namespace crumb {

// Thread-safe as DeviceDemoter says, if it has no tier.
class FakeDemoter : public DeviceDemoter {
 public:
  explicit FakeDemoter(FakeCopyTier* tier = nullptr) : tier_(tier) {}

  uint32_t MaxHeads(const Profile& /*profile*/) const override { return max_heads; }
  std::shared_ptr<const void> Hold(std::span<const std::byte> /*memory*/) override {
    ++num_held;
    return std::make_shared<int>(0);
  }
  void Prepare(const Profile& /*profile*/) override { ++num_prepared; }
  absl::StatusOr<std::unique_ptr<Lane>> Open(const Profile& profile, const Work& work) override {
    CRUMB_RETURN_IF_ERROR(fails_to_open);
    ++num_opened;
    return std::make_unique<FakeLane>(*this, profile, work);
  }

  // All before it is used.
  uint32_t max_heads = 64;
  absl::Status fails_to_open;
  absl::Status fails_to_send;
  absl::Status fails_to_finish;
  std::atomic<int> num_held = 0;
  std::atomic<int> num_prepared = 0;
  std::atomic<int> num_opened = 0;
  std::atomic<int> num_finished = 0;  // With OK.

 private:
  class FakeLane : public Lane {
   public:
    FakeLane(FakeDemoter& demoter, const Profile& profile, const Work& work)
        : demoter_(demoter), profile_(profile), work_(work), rows_(work.heads.count) {
      for (std::vector<std::byte>& rows : rows_) {
        rows.resize(profile.geometry().HeadRangeBytes(PageEncoding::kBf16));
      }
    }
    std::span<std::byte> Rows(uint32_t index) override { return rows_[index]; }
    absl::Status Send(uint32_t index) override {
      if (index != num_sent_++) {
        return absl::InternalError("heads are sent in order");
      }
      return demoter_.fails_to_send;
    }
    absl::Status SendHeld(uint32_t index,
                          std::span<const std::byte> rows,
                          uint32_t crc32c) override {
      std::copy(rows.begin(), rows.end(), rows_[index].begin());
      arrived_whole_ = arrived_whole_ && Crc32c(rows_[index]) == crc32c;
      return Send(index);
    }
    absl::Status Finish(std::span<std::byte> int2, std::span<uint32_t> head_crc32c) override {
      CRUMB_RETURN_IF_ERROR(demoter_.fails_to_finish);
      if (!arrived_whole_) {
        return absl::AbortedError("other rows than were announced");
      }
      const size_t bytes = profile_.geometry().HeadRangeBytes(PageEncoding::kInt2);
      std::vector<std::byte> stored(rows_[0].size());
      for (uint32_t i = 0; i < work_.heads.count; ++i) {
        const HeadRange head{work_.heads.first + i, 1};
        const auto codes = int2.subspan(i * bytes, bytes);
        if (work_.rows_are_rotated) {
          stored = rows_[i];
        } else {
          CRUMB_RETURN_IF_ERROR(RotatePage(profile_, head, 0, rows_[i], stored));
        }
        CRUMB_RETURN_IF_ERROR(DemotePage(profile_, head, 0, stored, codes));
        head_crc32c[i] = Crc32c(codes);
      }
      if (work_.copy.has_value()) {
        demoter_.tier_->Put(*work_.copy, int2);
      }
      ++demoter_.num_finished;
      return absl::OkStatus();
    }

   private:
    FakeDemoter& demoter_;
    const Profile& profile_;
    const Work work_;
    std::vector<std::vector<std::byte>> rows_;
    uint32_t num_sent_ = 0;
    bool arrived_whole_ = true;
  };

  FakeCopyTier* const tier_;
};

}  // namespace crumb
