// SPDX-License-Identifier: Apache-2.0
//
// One pull of a leased prefix: the memory its stream lands in, how far it has come, and whether its
// bytes are right. The bytes of one layer may be used before later ones are there; whether they
// were right is known only when all are there, since a checksum covers a KV head over all layers.
//
// Never believes a transport: over cma a receive can end with success on memory that its owner has
// reused meanwhile. What proves a page is its header (profile, namespace, position and the
// generation that the lease named) and the CRC-32C of each head.
//
// Thread-safe. Bytes land on the worker's thread, are verified on the verifier's, and are read on
// the engine's.
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
  // Memory for all pages that are present in `prefix`. cut.ordered_layers 0: as many
  // as DefaultOrderedLayers says. INVALID_ARGUMENT: there is none, or more
  // than a pull may have. RESOURCE_EXHAUSTED: no memory.
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

  // The worker's thread. Where a chunk of `bytes` bytes is to land; each piece of the plan is taken
  // once. DATA_LOSS for one that this pull has no place for.
  absl::StatusOr<std::span<std::byte>> TargetOf(const ChunkMessage& chunk, size_t bytes);
  // The chunk's transfer has ended. True when there is something new to verify.
  bool Landed(const ChunkMessage& chunk, size_t bytes);
  // No more bytes will come. The first failure stays; none after everything has been verified.
  void Fail(const absl::Status& status);
  // Still waiting for bytes.
  bool IsOpen() const;

  // The verifier's thread. Verifies what has landed since the last call.
  void Verify();

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
  // Adds what lies within the stream's first `landed` bytes to the checksums, while it is still in
  // the cache. Of what came twice, the bytes that HeadBlock shows.
  void AddLanded(size_t landed);
  bool AddOrderedLayers(size_t landed);
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

  // Confined to the worker's thread.
  std::vector<bool> is_taken_;  // One a piece.

  // Confined to the verifier's thread.
  uint32_t next_layer_ = 0;  // Ordered; the blocks of which are to be added next.
  uint32_t next_entry_ = 0;  // Of that layer, or of the images after the last one.
  bool headers_checked_ = false;
  bool is_summed_ = false;           // All bytes have been added.
  std::vector<uint32_t> checksums_;  // [entries, heads], over what was added so far.

  mutable absl::Mutex mutex_;
  std::vector<bool> has_landed_ ABSL_GUARDED_BY(mutex_);  // One a piece.
  size_t num_landed_ ABSL_GUARDED_BY(mutex_) = 0;         // Pieces before the first that has not.
  size_t landed_bytes_ ABSL_GUARDED_BY(mutex_) = 0;       // Of those.
  bool verified_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb
