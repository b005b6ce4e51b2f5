// SPDX-License-Identifier: Apache-2.0
//
// Copies of pages in one GPU's memory: segments that engines on the same GPU map by a descriptor,
// for reading only. The only part of the daemon that uses a GPU.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

#include "crumb/cuda/shared_memory.h"
#include "crumb/cuda/transfer.h"
#include "daemon/tier/copy_tier.h"

namespace crumb {

// Thread-safe as CopyTier says; one Write at a time, others wait.
class GpuTier : public CopyTier {
 public:
  struct Options {
    int device = 0;
    size_t capacity_bytes = 0;  // Whole segments of it are used.
    size_t segment_bytes = 0;   // Rounded up to units of 2 MiB.
  };

  // Allocates all segments. INVALID_ARGUMENT: less than one segment, or no such device.
  // RESOURCE_EXHAUSTED: the device has not so much memory, or this process not so many descriptors.
  // UNIMPLEMENTED, UNAVAILABLE: no GPU, or none that can do this; the message says why.
  static absl::StatusOr<std::unique_ptr<GpuTier>> Create(const Options& options);

  std::string Description() const override;
  size_t segment_bytes() const override { return segment_bytes_; }
  uint32_t num_segments() const override { return static_cast<uint32_t>(segments_.size()); }
  absl::Status CheckGeometry(const Geometry& geometry) const override;
  absl::StatusOr<UniqueFd> Share(uint32_t segment) const override;
  // shared: only to hide what it is.
  std::shared_ptr<const void> Hold(std::span<const std::byte> memory) const override;
  absl::Status Renew(uint32_t segment) override;
  std::vector<absl::Status> Write(std::span<const PageCopy> copies) override;

  int device() const { return device_; }
  const GpuUuid& uuid() const { return uuid_; }
  // On the device: of a segment that the store gave out, as long as it is not renewed.
  std::byte* Address(const CopyPlace& place) const {
    return segments_[place.segment]->data() + place.offset;
  }

 private:
  GpuTier() = default;
  // Copies and checksums up to kMaxCopies of them; nothing of it is under way on return.
  absl::Status WriteSome(std::span<const PageCopy> copies, std::vector<uint32_t>* checksums)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status EnqueueCopies(std::span<const PageCopy> copies,
                             std::span<std::byte* const> targets,
                             std::vector<uint32_t>* checksums)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  int device_ = 0;
  std::string name_;
  GpuUuid uuid_{};
  size_t segment_bytes_ = 0;
  // Each is exchanged by Renew, when nobody else uses it. Null: there was no memory for it.
  std::vector<std::unique_ptr<SharedGpuMemory>> segments_;

  absl::Mutex mutex_;
  std::unique_ptr<OwnGpuStream> stream_ ABSL_PT_GUARDED_BY(mutex_);
  // Addresses of images, and their checksums.
  std::unique_ptr<OwnGpuMemory> scratch_ ABSL_PT_GUARDED_BY(mutex_);
};

}  // namespace crumb
