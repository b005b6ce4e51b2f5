// SPDX-License-Identifier: Apache-2.0
//
// The only owner of page state: which pages exist, who may read them, what may be evicted. It sits
// on the pure radix index (daemon/index), a policy (daemon/policy) and the arena of memfd chunks
// (daemon/tier), and knows nothing of RPCs, sockets or codecs.
//
// Life of a page:   reserved (BeginPublish) -> resident (CommitPublish) -> free. A lease that runs
// out, or whose session dies, holds its pages for a quarantine longer: its reader may not know yet.
// They stay visible to others meanwhile.
//
// Invariants, held after each call and checked by CheckInvariants():
//   1. A page is visible only after all its bytes and checksums are in place (one step a publish).
//   2. Every resident page is reachable from its namespace's root: eviction takes leaves first.
//   3. A page in a lease, or read by a transfer, is neither evicted nor reused.
//   4. Bytes in chunks never exceed the capacity; a chunk holds pages of one namespace for ever and
//      is given back to the system when it is empty, never to another namespace.
//   5. A block's generation moves on before its bytes may change.
//   6. A copy of a page in the tier beside has the page's bytes, is held by what holds the page,
//   and
//      goes with it at the latest.
//   7. A session that ended owns nothing; memory that it still writes is freed when it stops.
//
// Thread-safe: one mutex; no I/O, RPC or copy of page bytes under it. Time comes from the Clock.
// Errors named in no comment: FAILED_PRECONDITION when the session is not attached (any more).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

#include "daemon/store/store_types.h"
#include "daemon/tier/chunk_memory.h"
#include "daemon/tier/copy_tier.h"
#include "daemon/tier/populate.h"
#include "proto/base/clock.h"
#include "proto/base/ids.h"
#include "proto/page/page_header.h"

namespace crumb {

namespace store_internal {
class StoreCore;
struct CopyHold;
struct ReadHold;
struct WriteHold;
}  // namespace store_internal

// One block held for reading.
struct PinnedPage {
  PageKey key;
  PageHeader header;                 // A copy, with an even generation.
  std::span<const std::byte> bytes;  // The session's heads of the image: [kv_head][layer].
};

// Blocks held for reading: neither evicted nor reused until this is destroyed, even if the lease or
// the session ends meanwhile. For a transfer in flight. Move-only, Thread-compatible; must not
// outlive the store.
class ReadGuard {
 public:
  ReadGuard();
  ~ReadGuard();
  ReadGuard(ReadGuard&& other) noexcept;
  ReadGuard& operator=(ReadGuard&& other) noexcept;
  ReadGuard(const ReadGuard&) = delete;
  ReadGuard& operator=(const ReadGuard&) = delete;

  // In the order asked for.
  std::span<const PinnedPage> pages() const;

 private:
  friend class PageStore;
  std::unique_ptr<store_internal::ReadHold> hold_;
};

// A block of a publish's plan to write.
struct WritableBlock {
  PageKey key;
  // The session's heads of the image: [kv_head][layer]. No one else reads or writes them.
  std::span<std::byte> bytes;
  FreshMemory fresh = {};  // For Populate, before the first write of `bytes`.
};

// Blocks of an unfinished publish held for writing. Their memory is not reused until this is
// destroyed, even if the publish or the session ends meanwhile. Destroy it before CommitPublish.
// Move-only, Thread-compatible; must not outlive the store.
class WriteGuard {
 public:
  WriteGuard();
  ~WriteGuard();
  WriteGuard(WriteGuard&& other) noexcept;
  WriteGuard& operator=(WriteGuard&& other) noexcept;
  WriteGuard(const WriteGuard&) = delete;
  WriteGuard& operator=(const WriteGuard&) = delete;

  // In the order of the plan.
  std::span<const WritableBlock> blocks() const;
  // Where in the tier beside the bytes of one of blocks() may be put as well, so that the commit,
  // told by WrittenBlock::is_copied, makes both readable in one step. The publish keeps the place
  // until it ends. None: there is no tier, or no room. Any thread, for different blocks at once.
  std::optional<CopyPlace> ReserveCopy(const WritableBlock& block) const;

 private:
  friend class PageStore;
  std::unique_ptr<store_internal::WriteHold> hold_;
};

// Blocks on their way into the tier beside, whose places and sources are held until this is
// destroyed. Then those that have arrived become readable, and the places of the others free.
// Move-only, Thread-compatible; must not outlive the store.
class CopyBatch {
 public:
  CopyBatch();
  ~CopyBatch();
  CopyBatch(CopyBatch&& other) noexcept;
  CopyBatch& operator=(CopyBatch&& other) noexcept;
  CopyBatch(const CopyBatch&) = delete;
  CopyBatch& operator=(const CopyBatch&) = delete;

  // For CopyTier::Write.
  std::span<const PageCopy> copies() const;
  void SetArrived(size_t index);

 private:
  friend class PageStore;
  std::unique_ptr<store_internal::CopyHold> hold_;
};

class PageStore {
 public:
  // INVALID_ARGUMENT names the option, its value and its limit. `tier` may be null: then there are
  // no copies. It outlives the store.
  static absl::StatusOr<std::unique_ptr<PageStore>> Create(const StoreOptions& options,
                                                           const Clock& clock,
                                                           const CopyTier* tier = nullptr);
  // No guard may be alive.
  ~PageStore();
  PageStore(const PageStore&) = delete;
  PageStore& operator=(const PageStore&) = delete;

  const StoreOptions& options() const { return options_; }

  // INVALID_ARGUMENT: name, tenant, geometry or heads out of bounds. RESOURCE_EXHAUSTED: too many
  // sessions. UNAVAILABLE: draining.
  absl::StatusOr<SessionId> OpenSession(const SessionSpec& spec);
  // Ends a session's leases (their pages go through quarantine) and publishes. No error if it is
  // not there.
  void EndSession(SessionId session);

  // The longest usable prefix of `tokens`, the whole prompt, under one lease; a miss is OK with no
  // pages and no lease. Touches the path it returns. Only pages that hold all of the session's
  // heads count. INVALID_ARGUMENT: no tokens, or too many; context key too long.
  // RESOURCE_EXHAUSTED: too many leases. UNAVAILABLE: draining.
  absl::StatusOr<LookupResult> Lookup(SessionId session,
                                      std::string_view context_key,
                                      std::span<const uint32_t> tokens,
                                      bool allow_int2_window);
  // As Lookup, with no lease, no count and no effect on recency.
  absl::StatusOr<PrefixLength> Probe(SessionId session,
                                     std::string_view context_key,
                                     std::span<const uint32_t> tokens) const;
  // The same for operators, over all KV heads. NOT_FOUND: no such namespace.
  absl::StatusOr<PrefixLength> Probe(const NamespaceId& namespace_id,
                                     std::span<const uint32_t> tokens) const;

  // Reserves what is missing of the prefix `tokens`: whole pages, at least one. What is there
  // already is held, so that it cannot vanish before Commit. Pages of the sink are wanted in BF16,
  // all others in INT2, those of the last recent window in BF16 too (the tail). Evicts when there
  // is no room; RESOURCE_EXHAUSTED at once, with nothing evicted, when that would not do, or too
  // many publishes are unfinished. ABORTED: too many others publish the same pages just now.
  // INVALID_ARGUMENT, UNAVAILABLE as Lookup.
  absl::StatusOr<PublishPlan> BeginPublish(SessionId session,
                                           std::string_view context_key,
                                           std::span<const uint32_t> tokens);
  // Holds for writing what the plan has of `pages`, which ascend (none: of all) and has not been
  // written yet; perhaps nothing. Any thread may then write. NOT_FOUND: no such publish.
  // FAILED_PRECONDITION: another WriteGuard has such a block.
  absl::StatusOr<WriteGuard> BeginWrite(SessionId session,
                                        PublishId publish,
                                        std::span<const PageIdx> pages = {});
  // Notes that these blocks have been written, for CommitPublish; once the WriteGuard is gone.
  // NOT_FOUND: no such publish. INVALID_ARGUMENT: a block that is repeated or out of order, not in
  // the plan, or with another number of checksums; names the page. FAILED_PRECONDITION: a
  // WriteGuard of it is alive. After an error none is noted.
  absl::Status KeepWritten(SessionId session, PublishId publish, std::vector<WrittenBlock> written);
  // Makes what was written, before or as `written` says, visible in one step and ends the publish.
  // A BF16 block of the tail may be left out; nothing else may. What someone else committed
  // meanwhile is a success. Errors as KeepWritten; INVALID_ARGUMENT also: a block is missing. After
  // an error the publish goes on.
  absl::StatusOr<CommitResult> CommitPublish(SessionId session,
                                             PublishId publish,
                                             std::span<const WrittenBlock> written);
  // NOT_FOUND: no such publish.
  absl::Status AbortPublish(SessionId session, PublishId publish);

  // Moves the deadlines to options().lease from now. Returns those that are over, or never were the
  // session's.
  absl::StatusOr<std::vector<LeaseId>> RenewLeases(SessionId session,
                                                   std::span<const LeaseId> leases);
  // Ends leases at once, without quarantine: the session does not read them any more. Unknown ones
  // are ignored.
  absl::Status ReleaseLeases(SessionId session, std::span<const LeaseId> leases);

  // Holds pages of a lease for reading. FAILED_PRECONDITION: the lease is over, or not the
  // session's. INVALID_ARGUMENT: a page beyond the lease, or an encoding that its lookup did not
  // give.
  absl::StatusOr<ReadGuard> BeginRead(SessionId session,
                                      LeaseId lease,
                                      std::span<const PageKey> keys);

  // The memory of a chunk, for a reader to map. NOT_FOUND: no such chunk (any more: look the prefix
  // up again). PERMISSION_DENIED: of another tenant or profile.
  absl::StatusOr<ChunkFd> GetChunk(SessionId session, ChunkId chunk) const;

  // The same of a chunk of copies, by the ids that PageRef's copies have. FAILED_PRECONDITION also:
  // there is no tier beside.
  absl::StatusOr<CopyChunkFds> GetCopyChunk(SessionId session, ChunkId chunk) const;

  // Chunks that GetChunk, or GetCopyChunk for `of_copies`, would give the session: those with ids
  // below `below` (0: all), the newest first, at most `max`.
  absl::StatusOr<std::vector<ChunkName>> ListChunks(SessionId session,
                                                    bool of_copies,
                                                    ChunkId below,
                                                    size_t max) const;

  // For the one who copies into the tier beside. What was published, or looked up by a session that
  // reads copies, is wanted there.

  // Blocks until there may be something to copy or a segment to renew. False: StopCopies was
  // called.
  bool AwaitCopyWork();
  void StopCopies();
  // Blocks that are to be copied now, in order of pages, up to `max_bytes` or little more. Makes
  // room by dropping copies that were used longer ago, of no page that is held. None: nothing is
  // wanted, there is no room, or StopCopies was called.
  CopyBatch BeginCopies(size_t max_bytes);
  // For the one who prepares memory for the tier beside: blocks until a chunk was made, and gives
  // its memory, of each once. Null: StopCopies was called. shared: with the chunk.
  std::shared_ptr<ChunkMemory> AwaitNewChunk();
  // Segments that are not used any more, each told once: to be renewed and then returned. Until
  // then they hold nothing.
  std::vector<uint32_t> TakeSpentSegments();
  void ReturnSegment(uint32_t segment);

  // Ends what is due: leases, quarantines. Call it several times a second.
  void Tick();

  // Drops the pages of a prefix and all that extend it, except what is held; no tokens: the whole
  // namespace. INVALID_ARGUMENT: not whole pages. NOT_FOUND: no such namespace.
  absl::StatusOr<EvictResult> Evict(const NamespaceId& namespace_id,
                                    std::span<const uint32_t> tokens);

  // From now on no new sessions, lookups or publishes. What was begun may be finished.
  void SetDraining();

  StoreStatus Status() const;
  // At most `max_nodes` nodes of one namespace, or of all. NOT_FOUND: no such namespace.
  absl::StatusOr<TreeStatus> Tree(std::optional<NamespaceId> namespace_id,
                                  uint32_t max_nodes) const;

  // INTERNAL, naming what does not hold. For tests; visits everything.
  absl::Status CheckInvariants() const;

 private:
  friend class CopyBatch;
  friend class ReadGuard;
  friend class WriteGuard;
  class Access;

  PageStore(const StoreOptions& options, const Clock& clock, const CopyTier* tier);
  void EndCopies(const store_internal::CopyHold& hold);
  void EndRead(const store_internal::ReadHold& hold);
  void EndWrite(const store_internal::WriteHold& hold);
  std::optional<CopyPlace> ReserveCopy(const store_internal::WriteHold& hold, size_t index);

  const StoreOptions options_;
  const Clock& clock_;
  mutable absl::Mutex mutex_;
  const std::unique_ptr<store_internal::StoreCore> core_ ABSL_PT_GUARDED_BY(mutex_);
};

}  // namespace crumb
