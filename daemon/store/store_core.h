// SPDX-License-Identifier: Apache-2.0
//
// The state machine behind PageStore, whose functions have the same names, results and errors here.
// PageStore adds the mutex, reads the clock, and destroys closed chunks after it has unlocked.
//
// How holding works. A page is kept by a pin on it or on any page after it in the tree
// (radix_tree.h): a lease, a publish and a read each have one, on the last page they use. A BF16
// copy beyond the sink may be evicted alone, so those that a lease or a publish relies on are held
// one by one. Blocks that a guard gave out are held too. What is held by none of these is idle, and
// only idle things are freed.
//
// A page that an unfinished publish wants is in the tree at once, with blocks of which no head is
// present: invisible, because a lookup counts a page only by its heads. Commit sets the bits of all
// its pages; abort frees the blocks, and the tree is trimmed of pages without any.
//
// Thread-compatible (the store's mutex).
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "daemon/policy/lru_queue.h"
#include "daemon/store/block_table.h"
#include "daemon/store/copy_table.h"
#include "daemon/store/eviction_planner.h"
#include "daemon/store/store_model.h"
#include "daemon/store/store_types.h"

namespace crumb::store_internal {

class StoreCore {
 public:
  // `tier` may be null.
  StoreCore(const StoreOptions& options, const CopyTier* tier);
  ~StoreCore();
  StoreCore(const StoreCore&) = delete;
  StoreCore& operator=(const StoreCore&) = delete;

  // Sessions and their end.
  absl::StatusOr<SessionId> OpenSession(const SessionSpec& spec, absl::Time now);
  void EndSession(SessionId id, absl::Time now);
  absl::StatusOr<ChunkFd> GetChunk(SessionId session, ChunkId chunk) const;
  absl::StatusOr<CopyChunkFds> GetCopyChunk(SessionId session, ChunkId chunk) const;
  absl::StatusOr<std::vector<ChunkName>> ListChunks(SessionId session,
                                                    bool of_copies,
                                                    ChunkId below,
                                                    size_t max) const;

  // Copies in the tier beside.
  CopyHold BeginCopies(size_t max_bytes);
  void EndCopies(const CopyHold& hold);
  bool HasCopyWork() const {
    return stopped_copying_ || !promotions_.empty() || copies_.has_spent();
  }
  bool HasNewChunk() const { return stopped_copying_ || blocks_.has_new_chunks(); }
  // shared: with the chunk.
  std::shared_ptr<ChunkMemory> TakeNewChunk() { return blocks_.TakeNewChunk(); }
  void StopCopies() { stopped_copying_ = true; }
  bool stopped_copying() const { return stopped_copying_; }
  std::vector<uint32_t> TakeSpentSegments() { return copies_.TakeSpent(); }
  void ReturnSegment(uint32_t segment) { copies_.ReturnSegment(segment); }

  // Lookups and leases.
  absl::StatusOr<LookupResult> Lookup(SessionId session,
                                      std::string_view context_key,
                                      std::span<const uint32_t> tokens,
                                      bool allow_int2_window,
                                      absl::Time now);
  absl::StatusOr<PrefixLength> Probe(SessionId session,
                                     std::string_view context_key,
                                     std::span<const uint32_t> tokens) const;
  absl::StatusOr<PrefixLength> Probe(const NamespaceId& namespace_id,
                                     std::span<const uint32_t> tokens) const;
  absl::StatusOr<std::vector<LeaseId>> RenewLeases(SessionId session,
                                                   std::span<const LeaseId> leases,
                                                   absl::Time now);
  absl::Status ReleaseLeases(SessionId session, std::span<const LeaseId> leases);
  absl::StatusOr<ReadHold> BeginRead(SessionId session,
                                     LeaseId lease,
                                     std::span<const PageKey> keys);
  void EndRead(const ReadHold& hold);
  // Ends what is due.
  void Tick(absl::Time now);

  // Publishes.
  absl::StatusOr<PublishPlan> BeginPublish(SessionId session,
                                           std::string_view context_key,
                                           std::span<const uint32_t> tokens,
                                           absl::Time now);
  absl::StatusOr<WriteHold> BeginWrite(SessionId session_id,
                                       PublishId id,
                                       std::span<const PageIdx> pages);
  void EndWrite(const WriteHold& hold);
  absl::Status KeepWritten(SessionId session_id, PublishId id, std::vector<WrittenBlock> written);
  std::optional<CopyPlace> ReserveCopy(const WriteHold& hold, size_t index);
  absl::StatusOr<CommitResult> CommitPublish(SessionId session_id,
                                             PublishId id,
                                             std::span<const WrittenBlock> written,
                                             absl::Time now);
  absl::Status AbortPublish(SessionId session_id, PublishId id);

  // Operators.
  absl::StatusOr<EvictResult> Evict(const NamespaceId& namespace_id,
                                    std::span<const uint32_t> tokens);
  void SetDraining() { draining_ = true; }
  StoreStatus Status(absl::Time now) const;
  absl::StatusOr<TreeStatus> Tree(std::optional<NamespaceId> namespace_id,
                                  uint32_t max_nodes,
                                  absl::Time now) const;
  absl::Status CheckInvariants() const;

  const StoreOptions& options() const { return options_; }
  // Closed chunks, to be destroyed without the lock.
  std::vector<std::unique_ptr<Chunk>> TakeClosedChunks();

 private:
  // What of a prompt a reader of `heads` could use.
  struct Coverage {
    PrefixPosition position;  // Of the whole match by tokens; its pages may be unfinished.
    UsableLength usable;
    uint32_t matched_pages = 0;
    // First page beyond the sink that is wanted in BF16: of the recent window, or before it one
    // that there are no two-bit rows of.
    uint32_t window_first = 0;
  };

  // session.cc
  absl::StatusOr<Session*> FindSession(SessionId id);
  absl::StatusOr<const Session*> FindSession(SessionId id) const;
  absl::Status CheckPrompt(std::string_view context_key, std::span<const uint32_t> tokens) const;
  absl::Status CheckNotDraining(std::string_view what) const;
  Namespace* FindNamespace(const Session& session, std::string_view context_key) const;
  absl::StatusOr<const Namespace*> FindNamespace(const NamespaceId& id) const;
  absl::Status CheckMayMap(const Session& session, const Chunk& chunk) const;
  absl::StatusOr<Namespace*> FindOrMakeNamespace(const Session& session,
                                                 std::string_view context_key);
  void DropNamespaceIfEmpty(Namespace* ns);

  // lookup.cc
  Coverage Cover(const Namespace& ns,
                 std::span<const uint32_t> tokens,
                 uint64_t heads,
                 bool allow_int2_window) const;
  PrefixLength LengthOf(const Coverage& coverage) const;
  std::vector<PageRef> PageTable(const Lease& lease) const;
  Lease& GrantLease(Session* session, Namespace* ns, const Coverage& coverage, absl::Time now);
  BlockRef RefOf(BlockSlot slot) const;
  std::optional<BlockRef> CopyRefOf(BlockSlot slot, uint64_t heads) const;
  bool LacksCopies(const std::vector<PageRef>& table) const;

  // lease.cc
  Lease* FindLease(const Session& session, LeaseId id);
  void SetEnd(Lease* lease, absl::Time end);
  void Quarantine(Lease* lease, absl::Time from);
  void DropLease(Lease* lease);
  BlockSlot ReadableBlock(const Lease& lease, const PageKey& key) const;

  // publish.cc
  absl::Status PlanPages(Publish* publish);
  absl::Status PlanBlock(Publish* publish, const PageKey& key, PageSlots* slots);
  static PerEncoding NeedOf(const Publish& publish);
  absl::Status AllocatePlan(Publish* publish, const PerEncoding& need);
  absl::StatusOr<Publish*> FindPublish(SessionId session_id, PublishId id);
  void EndPublish(Publish* publish);
  bool CommitItem(const Publish& publish, const PublishItem& item, const WrittenBlock& written);
  void Unclaim(Namespace* ns, BlockSlot slot, uint64_t heads);

  // write.cc
  absl::StatusOr<std::vector<const WrittenBlock*>> MatchWritten(
      const Publish& publish, std::span<const WrittenBlock> written) const;

  // pages.cc: blocks of pages.
  static BlockSlot& FirstSlot(PageSlots* slots, PageEncoding encoding);
  // The oldest block of a list that has all of `heads`; 0: none.
  BlockSlot CoveringBlock(BlockSlot first, uint64_t heads) const;
  bool AnyPresent(BlockSlot first) const;
  void Attach(Namespace* ns, PrefixNode* node, BlockSlot slot);
  void Detach(Namespace* ns, BlockSlot slot);
  void FreeIfUnused(Namespace* ns, BlockSlot slot);
  void Unhold(Namespace* ns, BlockSlot slot);
  void CountPresence(Namespace* ns, const PageSlots& slots, int change);
  RadixTree::Extension ExtendTree(Namespace* ns, std::span<const uint32_t> tokens);
  void RemoveLastPage(Namespace* ns, PrefixNode* node);
  void TrimUnusedPages(Namespace* ns, PrefixNode* node);

  // room.cc
  // Evicts so that the blocks fit; false, with nothing evicted, if nothing would make them fit.
  bool MakeRoom(Namespace* ns, const PerEncoding& need);
  absl::Status NoRoom(const Geometry& geometry, const PerEncoding& need) const;
  void EvictPage(Namespace* ns, PrefixNode* node);
  void EvictTailCopy(BlockSlot slot);
  uint64_t EvictFrom(Namespace* ns, PrefixNode* node, uint32_t first_kept);
  Namespace* NamespaceOf(const PrefixNode& node) const;

  // copies.cc
  bool MayHaveCopies(const Namespace& ns) const;
  // Queues what is not copied yet of a prefix of finished pages.
  void WantCopies(Namespace* ns, PrefixPosition prefix);
  bool IsCopyIdle(BlockSlot slot) const;
  int64_t CopyUse(BlockSlot slot) const;
  void DropCopy(BlockSlot slot);
  std::optional<std::vector<BlockSlot>> FindCopiesToDrop(const Chunk& home,
                                                         int64_t before,
                                                         bool* moved_any);
  bool MakeCopyRoom(const Chunk& home, int64_t before);
  // Has the block a place for its copy, used at `used`? At others' expense, if need be.
  bool TakeCopyPlace(BlockSlot slot, int64_t used);
  CopyPlace PlaceOf(const StoredBlock& block, size_t offset) const;
  void SettleCopy(BlockSlot slot,
                  uint64_t heads,
                  std::span<const uint32_t, Geometry::kMaxKvHeads> head_crc32c);
  void FreeCopyIfUnused(BlockCopy* copy);
  // Gives up the places that an unfinished publish reserved for heads, if it did.
  void ReturnCopy(BlockSlot slot, uint64_t heads);
  bool PlanCopy(Namespace* ns, BlockSlot slot, int64_t used, CopyHold* hold);
  bool PlanPageCopies(const Promotion& promotion, uint32_t page, CopyHold* hold);

  // status.cc
  TreeNodeStatus NodeStatus(const Namespace& ns, const PrefixNode& node, absl::Time now) const;
  void ListNodes(const Namespace& ns, uint32_t max_nodes, absl::Time now, TreeStatus* tree) const;

  // invariants.cc
  struct Census;
  absl::Status CheckNamespace(const Namespace& ns, Census* census) const;
  absl::Status CheckNode(const Namespace& ns, const PrefixNode& node, Census* census) const;
  absl::Status CheckReachable(const Namespace& ns, const PrefixNode& node) const;
  absl::Status CheckBlock(const Namespace& ns,
                          const PrefixNode& node,
                          uint32_t page,
                          BlockSlot slot,
                          Census* census) const;
  absl::Status CheckCopy(const Namespace& ns, BlockSlot slot, Census* census) const;
  absl::Status CheckCopies(const Census& census) const;
  absl::Status CheckOwners() const;

  // A stamp later than all before it, near `now`.
  int64_t NextStamp(absl::Time now);

  const StoreOptions options_;
  BlockTable blocks_;
  EvictionQueues queues_;
  CopyTable copies_;
  LruQueue<CopyItem> copy_queue_;     // Copies of which a head is readable.
  std::deque<Promotion> promotions_;  // Prefixes that wait to be copied, oldest first.
  absl::flat_hash_map<NamespaceId, std::unique_ptr<Namespace>> namespaces_;
  absl::flat_hash_map<SessionId, std::unique_ptr<Session>> sessions_;
  absl::flat_hash_map<LeaseId, std::unique_ptr<Lease>> leases_;
  absl::btree_set<std::pair<absl::Time, LeaseId>> lease_ends_;
  absl::flat_hash_map<PublishId, std::unique_ptr<Publish>> publishes_;
  StoreCounters counters_;
  uint64_t last_id_ = 0;  // Of sessions, leases and publishes.
  int64_t last_stamp_ = 0;
  size_t reads_ = 0;  // Guards alive.
  size_t writes_ = 0;
  size_t copying_ = 0;
  size_t leases_in_quarantine_ = 0;
  bool draining_ = false;
  bool stopped_copying_ = false;
};

}  // namespace crumb::store_internal
