// SPDX-License-Identifier: Apache-2.0
//
// One pull of a leased prefix: the memory its stream lands in, how far it has come, and
// whether its bytes are right. The bytes of one layer may be used before later ones are there;
// whether they were right is known only when all are there, since a checksum covers a KV head over
// all layers.
//
// Never believes a transport: over cma a receive can end with success on memory that its owner has
// reused meanwhile. What proves a page is its header (profile, namespace, position and the
// generation that the lease named) and the CRC-32C of each head.
//
// Thread-safe. Bytes land on the threads of several workers, each of which verifies what it has
// received, while that is in its core's cache. They are read on the engine's threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

#include "client/transport/page_source.h"
#include "client/transport/transfer_memory.h"
#include "proto/base/clock.h"
#include "proto/wire/pull_message.h"
#include "proto/wire/pull_plan.h"

namespace crumb {

class UcxPull {
 public:
  // Memory for all pages that are present in `prefix`. cut.ordered_layers 0: as many as
  // DefaultOrderedLayers says. INVALID_ARGUMENT: there is none, or more than a pull may have.
  // RESOURCE_EXHAUSTED: no memory.
  // shared: by the engine's handle, the list of open pulls, and transfers that have not ended.
  static absl::StatusOr<std::shared_ptr<UcxPull>> Create(const SessionInfo& session,
                                                         const LeasedPrefix& prefix,
                                                         BufferPool& buffers,
                                                         PullPlan::Cut cut,
                                                         absl::Time deadline,
                                                         const Clock& clock);

  // One layer in 32 comes ahead of the page images, or all layers come in their order where images
  // are too short to be messages of their own.
  static uint32_t DefaultOrderedLayers(const Geometry& geometry,
                                       std::span<const PageEncoding> encodings);

  // What is asked of the daemon.
  PullMessage request(uint64_t request_id) const;
  std::span<const PullEntry> entries() const { return entries_; }
  absl::Time deadline() const { return deadline_; }
  size_t total_bytes() const { return plan_.total_bytes(); }

  // Where a chunk of `bytes` bytes is to land; each piece of the plan is taken once. DATA_LOSS for
  // one that this pull has no place for.
  absl::StatusOr<std::span<std::byte>> TargetOf(const ChunkMessage& chunk, size_t bytes);
  // The chunk's transfer has ended. Verifies its images; ordered layers, as far as they have landed
  // without a gap.
  void Landed(const ChunkMessage& chunk, size_t bytes);
  // No more bytes will come. The first failure stays; none after everything has been verified.
  void Fail(const absl::Status& status);
  // Still waiting for bytes.
  bool IsOpen() const;

  // See PageSource; its first_image_layer is this.
  uint32_t ordered_layers() const { return plan_.cut().ordered_layers; }
  // Of the memory that the bytes land in, which later pulls land in too.
  absl::Status RegisterWithGpu();
  const std::byte* HeadBlock(PageIdx page,
                             PageEncoding encoding,
                             uint32_t layer,
                             uint32_t kv_head) const;
  absl::Status WaitForLayer(uint32_t layer);
  absl::Status Validate();
  size_t landed_bytes() const;

 private:
  static constexpr uint32_t kNoEntry = UINT32_MAX;

  UcxPull(const SessionInfo& session,
          const LeasedPrefix& prefix,
          std::vector<PullEntry> entries,
          PullPlan plan,
          BufferPool::Buffer buffer);

  absl::Status CheckHeaders() const;
  // Adds to the checksums the ordered layers, as far as they have landed, unless another thread is
  // at it, which then adds these too. True when all have been added, once.
  bool AddOrderedLayers();
  // Those of their blocks within the stream's first `landed` bytes. True when that is all of them.
  bool AddOrderedBlocks(size_t landed);
  // Those of the entry's layers that are shown in its image.
  void AddImage(uint32_t entry);
  // So many entries' images, or all ordered layers, have been added: after the last, the checksums
  // are compared.
  void EndAdding(size_t count);
  absl::Status CheckChecksums() const;
  const PageHeader& HeaderOf(uint32_t entry) const;
  absl::Status WaitUntil(const absl::Condition& reached);
  bool HasLanded(size_t bytes) const ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return !failure_.ok() || landed_bytes_ >= bytes;
  }
  bool IsSettled() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !failure_.ok() || verified_; }

  // Immutable.
  const ProfileId profile_id_;
  const NamespaceId namespace_id_;
  const HeadRange heads_;
  const LeaseId lease_;
  absl::Time deadline_;
  const Clock* clock_ = nullptr;
  const std::vector<PullEntry> entries_;
  const PullPlan plan_;
  std::vector<uint32_t> int2_entries_;  // Entry of each page, or kNoEntry.
  std::vector<uint32_t> bf16_entries_;
  BufferPool::Buffer buffer_;  // Its companion is guarded by registering_.
  absl::Mutex registering_;

  // Of the thread that adds ordered layers: is_adding_.
  uint32_t next_layer_ = 0;  // The blocks of which are to be added next.
  uint32_t next_entry_ = 0;  // Of that layer.
  bool headers_checked_ = false;
  std::vector<uint32_t> ordered_checksums_;  // [entries, heads], over what was added so far.

  // Each entry's is of the thread by which its image's last piece landed.
  std::vector<uint32_t> image_checksums_;  // [entries, heads]

  mutable absl::Mutex mutex_;
  std::vector<bool> is_taken_ ABSL_GUARDED_BY(mutex_);     // One a piece.
  std::vector<bool> has_landed_ ABSL_GUARDED_BY(mutex_);   // One a piece.
  size_t num_landed_ ABSL_GUARDED_BY(mutex_) = 0;          // Pieces before the first that has not.
  size_t landed_bytes_ ABSL_GUARDED_BY(mutex_) = 0;        // Of those.
  std::vector<uint32_t> missing_ ABSL_GUARDED_BY(mutex_);  // Pieces of each entry's image.
  bool is_adding_ ABSL_GUARDED_BY(mutex_) = false;         // Ordered layers, somebody is.
  size_t added_bytes_ ABSL_GUARDED_BY(mutex_) = 0;         // Of landed_bytes_, those seen by it.
  size_t num_to_add_ ABSL_GUARDED_BY(mutex_) = 0;          // Images, and the ordered layers as one.
  bool verified_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb
