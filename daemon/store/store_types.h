// SPDX-License-Identifier: Apache-2.0
//
// The values that go into and come out of PageStore. None refers to the store's state: they may be
// kept for as long as the caller likes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"

#include "proto/base/ids.h"
#include "proto/base/unique_fd.h"
#include "proto/page/geometry.h"
#include "proto/page/head_range.h"
#include "proto/page/page_format.h"
#include "proto/page/usable_length.h"

namespace crumb {

struct StoreOptions {
  // Bound of all chunks together, used or not. The arena's knob in the daemon's configuration.
  size_t capacity_bytes = size_t{4} << 30;
  // Largest chunk; a chunk holds at least one page. Smaller ones are made while a namespace is
  // small.
  size_t chunk_bytes = size_t{64} << 20;
  absl::Duration lease = absl::Seconds(30);
  // Added to a lease's deadline here, so that a reader that keeps to its own is never surprised.
  absl::Duration lease_grace = absl::Seconds(1);
  // How long the pages of a lease that ran out, or whose session died, are kept from reuse.
  absl::Duration quarantine = absl::Seconds(30);
  uint32_t max_sessions = 4096;
  uint32_t max_leases_per_session = 65536;
  uint32_t max_publishes_per_session = 64;
  uint32_t max_namespaces = 65536;
  uint32_t max_tokens = 1u << 20;  // Of one prompt or publish.
};

// What the store must know of a model profile.
struct PageProfile {
  ProfileId id;
  Geometry geometry;
  Windows windows;
};

// An engine rank that wants to attach.
struct SessionSpec {
  std::string client_name;
  uint32_t pid = 0;
  std::string tenant;
  PageProfile profile;
  HeadRange heads;  // count 0: all.
  // It reads copies in the tier beside: lookups say where they are, and have missing ones made.
  bool reads_copies = false;
};

// One encoding of one page of a prefix.
struct PageKey {
  PageIdx page;
  PageEncoding encoding = PageEncoding::kInt2;
  // NOLINTNEXTLINE(modernize-use-nullptr): clang-tidy 14 misreads a defaulted <=>.
  friend constexpr auto operator<=>(const PageKey&, const PageKey&) = default;
};

// Where one encoding of a page lies.
struct BlockRef {
  ChunkId chunk;
  uint32_t block = 0;
  Generation generation;
  friend bool operator==(const BlockRef&, const BlockRef&) = default;
};

// The encodings of one page that a reader may use. INT2 whenever it is there; BF16 in the sink and
// where the prompt's recent window needs it.
struct PageRef {
  std::optional<BlockRef> int2;
  std::optional<BlockRef> bf16;
  // The same bytes in the tier beside, in chunks of copies, for sessions that read those. As long
  // as the lease lasts, where they are there at its start.
  std::optional<BlockRef> int2_copy = std::nullopt;
  std::optional<BlockRef> bf16_copy = std::nullopt;
};

struct PrefixLength {
  uint32_t matched_tokens = 0;  // Token-verified, a multiple of kPageTokens.
  uint32_t usable_tokens = 0;   // The prefix to use.
  uint32_t trimmed_tokens = 0;  // Matched, given up to keep the recent window in BF16.
};

struct LookupResult {
  PrefixLength length;
  LeaseId lease;               // 0: no pages.
  std::vector<PageRef> pages;  // [0, length.usable_tokens / kPageTokens).
};

struct PublishPlan {
  PublishId id;
  // What the store lacks for the session's heads; ascending by page, INT2 before BF16 of one page.
  // Empty: everything is there already. Commit is still due: it counts as a use.
  std::vector<PageKey> missing;
};

// What was written to one block of the plan.
struct WrittenBlock {
  PageIdx page;
  PageEncoding encoding = PageEncoding::kInt2;
  // CRC-32C of each of the session's heads over the stored bytes, in their order.
  std::vector<uint32_t> head_crc32c;
  // The same bytes are in place in the tier beside too, where WriteGuard::ReserveCopy said.
  bool is_copied = false;
};

struct CommitResult {
  uint32_t pages_added = 0;    // Pages to which this publish added something.
  uint32_t pages_present = 0;  // Pages that were whole before, or came from someone else meanwhile.
};

struct ChunkName {
  ChunkId id;
  PageEncoding encoding = PageEncoding::kInt2;
  friend bool operator==(const ChunkName&, const ChunkName&) = default;
};

// A chunk as it is passed to a reader.
struct ChunkFd {
  UniqueFd fd;  // The receiver's own; sealed against writing and resizing.
  size_t bytes = 0;
  uint32_t num_blocks = 0;
};

// A chunk of copies as it is passed to a reader: the table of headers, and the tier's memory.
struct CopyChunkFds {
  UniqueFd headers;  // A memfd, sealed against writing and resizing.
  UniqueFd memory;   // What the tier's devices map.
  size_t memory_bytes = 0;
  uint32_t num_blocks = 0;
};

struct EvictResult {
  uint64_t evicted_pages = 0;
  uint64_t freed_bytes = 0;
  uint64_t held_pages_kept = 0;  // In leases, quarantine, transfers or unfinished publishes.
};

// Since the store was made.
struct StoreCounters {
  uint64_t lookups = 0;
  uint64_t lookup_tokens = 0;
  uint64_t hit_tokens = 0;  // Matched.
  uint64_t usable_tokens = 0;
  uint64_t trimmed_tokens = 0;
  uint64_t publishes_committed = 0;
  uint64_t publishes_aborted = 0;  // By the engine or by the end of its session.
  uint64_t publishes_refused = 0;  // No room, or too many of the same pages at once.
  uint64_t published_pages = 0;
  uint64_t evicted_pages = 0;
  uint64_t evicted_tail_copies = 0;  // BF16 copies dropped from pages that stayed in INT2.
  uint64_t leases_granted = 0;
  uint64_t expired_leases = 0;
  // Of the tier beside.
  uint64_t copies = 0;           // Made.
  uint64_t failed_copies = 0;    // Whose bytes did not arrive, or not right.
  uint64_t unplaced_copies = 0;  // Prefixes for which there was no room, from some page on.
  uint64_t dropped_copies = 0;   // For colder than what needed their place: the page stayed.
};

struct SessionStatus {
  SessionId id;
  std::string client_name;
  uint32_t pid = 0;
  std::string tenant;
  ProfileId profile_id;
  absl::Duration age;
  uint64_t leases = 0;
  uint64_t publishes = 0;
};

struct NamespaceStatus {
  NamespaceId id;
  std::string tenant;
  ProfileId profile_id;
  std::string context_key;
  uint64_t pages = 0;  // Resident, in any encoding.
  uint64_t used_bytes = 0;
  uint64_t bf16_equivalent_bytes = 0;  // What the same pages would take in BF16.
};

// A consistent picture of the whole.
struct StoreStatus {
  bool draining = false;
  uint64_t capacity_bytes = 0;
  uint64_t chunk_bytes = 0;  // Held in chunks, used or not.
  uint64_t used_bytes = 0;   // In resident and unfinished pages.
  uint64_t num_chunks = 0;
  uint64_t int2_pages = 0;
  uint64_t bf16_pages = 0;
  uint64_t leases = 0;
  uint64_t leased_pages = 0;  // Held by leases, quarantine, transfers or unfinished publishes.
  uint64_t publishes = 0;     // Unfinished.
  uint64_t unfinished_bytes = 0;
  uint64_t quarantined_leases = 0;
  uint64_t quarantined_bytes = 0;
  uint64_t index_nodes = 0;
  uint64_t copy_capacity_bytes = 0;  // Of the tier beside; 0: there is none.
  uint64_t copy_chunk_bytes = 0;
  uint64_t copy_used_bytes = 0;
  uint64_t copies = 0;              // Blocks that have one, or are getting one.
  uint64_t waiting_promotions = 0;  // Prefixes that wait to be copied.
  StoreCounters counters;
  std::vector<SessionStatus> sessions;      // Ascending by id.
  std::vector<NamespaceStatus> namespaces;  // Ascending by tenant, then context key.
};

// One branch of a namespace's prefixes.
struct TreeNodeStatus {
  uint32_t id = 0;         // Within one answer, from 1.
  uint32_t parent_id = 0;  // 0: a root.
  NamespaceId namespace_id;
  uint32_t first_token = 0;
  uint32_t num_tokens = 0;
  uint64_t int2_bytes = 0;
  uint64_t bf16_bytes = 0;
  uint64_t hits = 0;  // Lookups that used at least one page of this branch.
  uint32_t leases = 0;
  absl::Duration idle;                // Since its last use.
  std::vector<uint32_t> head_tokens;  // The first 16.
};

struct TreeStatus {
  std::vector<TreeNodeStatus> nodes;  // Parents before children.
  bool truncated = false;
};

}  // namespace crumb
