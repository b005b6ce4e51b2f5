// SPDX-License-Identifier: Apache-2.0
//
// Demotion of pages of any sequences, all layers and heads of a rank in one launch, and what it
// found out about them. Nobody waits for a launch: its findings are copied out behind it, and read
// when somebody asks.
//
// Thread-safe; what several threads enqueue goes to streams of their own.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

#include "client/gpu/gpu_page_table.h"
#include "crumb/cuda/demote_pages.h"
#include "crumb/cuda/transfer.h"
#include "proto/page/head_range.h"

namespace crumb {

class PageDemoter {
 public:
  struct Shape {
    Geometry geometry;         // Of the rank: num_kv_heads counts its heads only.
    HeadRange heads;           // In the model; for people.
    DeviceHeads device_heads;  // Of the rank.
  };
  // A page whose bytes are not there.
  struct Spoiled {
    const std::byte* int2 = nullptr;
    absl::Status why;  // Names K or V, layer, head and token of a row with NaN or inf.
  };

  // On the current device.
  static absl::StatusOr<std::unique_ptr<PageDemoter>> Create(const Shape& shape);

  // Enqueues the demotion of those that have an INT2 page to be filled. Blocks only while the work
  // of kLaunches launches ago has not ended.
  absl::Status Enqueue(std::span<const GpuPageTable::Demotion> demotions, GpuStream stream);

  // INT2 pages that were not made, of launches that have ended; each once.
  std::vector<Spoiled> TakeSpoiled();

 private:
  static constexpr size_t kLaunches = 4;       // Under way at a time.
  static constexpr uint32_t kMaxPages = 4096;  // Of a launch; more go in several.

  // Tables and findings of one launch at a time, here and on the device, in the same order:
  // [2, kMaxPages] pages to read and to fill, [kMaxPages] findings.
  struct Launch {
    std::byte* host = nullptr;
    std::byte* device = nullptr;
    std::unique_ptr<OwnGpuEvent> ended;
    bool is_busy = false;                // Its tables are being written.
    std::vector<const std::byte*> int2;  // Whose findings may still come.
  };

  explicit PageDemoter(const Shape& shape) : shape_(shape) {}

  absl::Status EnqueueSome(std::span<const GpuPageTable::Demotion* const> demotions,
                           GpuStream stream);
  absl::Status Send(const Launch& launch,
                    std::span<const GpuPageTable::Demotion* const> demotions,
                    GpuStream stream) const;
  DemotePagesParams Params(const Launch& launch, uint32_t num_pages) const;
  Launch* Acquire();
  // Moves what has come of a launch's findings to spoiled_.
  void ReadFindings(Launch* launch) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Shape shape_;
  std::unique_ptr<OwnPinnedMemory> host_;
  std::unique_ptr<OwnGpuMemory> device_;

  absl::Mutex mutex_;
  std::array<Launch, kLaunches> launches_ ABSL_GUARDED_BY(mutex_);
  size_t next_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<Spoiled> spoiled_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb
