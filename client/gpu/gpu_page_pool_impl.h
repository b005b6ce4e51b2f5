// SPDX-License-Identifier: Apache-2.0
//
// A pool behind its public face: memory, who has which page of it, and what all of the rank's
// launches take from the profile.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

#include "client/gpu/gpu_page_table.h"
#include "client/gpu/page_demoter.h"
#include "client/gpu/page_shelf.h"
#include "crumb/cuda/device_profile.h"
#include "crumb/cuda/transfer.h"
#include "crumb/gpu_page_pool.h"

namespace crumb {

// Thread-safe.
class GpuPagePool::Impl : public GpuPageSource {
 public:
  // `options` are checked, and heads.count is not 0.
  static absl::StatusOr<std::unique_ptr<Impl>> Create(Options options);

  const Options& options() const { return options_; }
  const Geometry& geometry() const { return geometry_; }  // Of the rank.
  const DeviceHeads& device_heads() const { return profile_->heads(); }
  // By which outputs are rotated back, as queries are rotated; null: they are not.
  const DeviceHeads* output_heads() const {
    return output_profile_ == nullptr ? nullptr : &output_profile_->heads();
  }
  PageDemoter& demoter() { return *demoter_; }
  // Names a sequence for good.
  uint64_t NextSequenceId();

  absl::Status Take(PageEncoding encoding, std::span<std::byte*> pages) override;
  void Return(PageEncoding encoding, std::byte* page) override;
  Usage usage(PageEncoding encoding) const;

  // Why a page of the table holds no bytes that may be used, of demotions that have ended; OK if
  // all do.
  absl::Status CheckPages(const GpuPageTable& pages);

 private:
  explicit Impl(Options options);
  absl::Status Allocate();
  PageShelf& shelf(PageEncoding encoding) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return encoding == PageEncoding::kInt2 ? *int2_ : *bf16_;
  }

  const Options options_;
  const Geometry geometry_;
  std::unique_ptr<OwnGpuMemory> int2_memory_;
  std::unique_ptr<OwnGpuMemory> bf16_memory_;
  std::unique_ptr<DeviceProfile> profile_;
  std::unique_ptr<DeviceProfile> output_profile_;
  std::unique_ptr<PageDemoter> demoter_;

  mutable absl::Mutex mutex_;
  std::unique_ptr<PageShelf> int2_ ABSL_PT_GUARDED_BY(mutex_);
  std::unique_ptr<PageShelf> bf16_ ABSL_PT_GUARDED_BY(mutex_);
  std::vector<PageDemoter::Spoiled> spoiled_ ABSL_GUARDED_BY(mutex_);  // Pages that are held.
  uint64_t last_sequence_id_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace crumb
