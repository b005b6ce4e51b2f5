// SPDX-License-Identifier: Apache-2.0
//
// The only owner of page state: which pages exist, who may read them, what may be evicted. It sits
// on the pure radix index (daemon/index), a policy (daemon/policy) and the arena of memfd chunks
// (daemon/tier), and knows nothing of RPCs, sockets or codecs.
//
// Life of a page:   reserved (BeginPublish) -> resident (CommitPublish) -> free, or through
// quarantine when a lease on it ran out instead of being released: its reader may not know yet.
//
// Invariants, held after each call and checked by CheckInvariants():
//   1. A page is visible only after all its bytes and checksums are in place (one step a publish).
//   2. Every resident page is reachable from its namespace's root: eviction takes leaves first.
//   3. A page in a lease, or read by a transfer, is neither evicted nor reused.
//   4. Bytes in chunks never exceed the capacity; a chunk holds pages of one namespace for ever and
//   is
//      given back to the system when it is empty, never to another namespace.
//   5. A block's generation moves on before its bytes may change.
//   6. A session that ended owns nothing.
//
// Thread-safe: one mutex; no I/O, RPC or copy of page bytes under it. Time comes from the Clock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "crumb/cuda/profile.h"
#include "proto/base/clock.h"
#include "proto/base/ids.h"
#include "proto/page/chunk_layout.h"
#include "proto/page/page_header.h"
#include "proto/page/usable_length.h"

namespace crumb {

struct StoreOptions {
  size_t capacity_bytes = size_t{4} << 30;
  size_t chunk_bytes = size_t{64} << 20;  // Target; a chunk holds at least one page.
  absl::Duration lease = absl::Seconds(30);
  // How long the memory of a lease that ran out is kept from reuse.
  absl::Duration quarantine = absl::Seconds(30);
  uint32_t max_sessions = 4096;
  uint32_t max_leases_per_session = 65536;
  uint32_t max_publishes_per_session = 64;
};

// Where one encoding of a page lies.
struct BlockRef {
  ChunkId chunk;
  uint32_t block = 0;
  Generation generation;
  friend bool operator==(const BlockRef&, const BlockRef&) = default;
};

struct PageRef {
  std::optional<BlockRef> int2;
  std::optional<BlockRef> bf16;
};

// Whose prefixes: what a session is attached to, plus a request's context key.
struct NamespaceKey {
  std::string tenant;
  std::shared_ptr<const Profile> profile;  // shared: with sessions and other namespaces.
  std::string context_key;
};

struct LookupResult {
  uint32_t matched_tokens = 0;
  uint32_t usable_tokens = 0;
  uint32_t trimmed_tokens = 0;
  LeaseId lease;               // 0: no pages.
  std::vector<PageRef> pages;  // [0, usable_tokens / kPageTokens).
};

// A block that a publish may write: its bytes are this publish's alone until Commit or Abort.
struct WritableBlock {
  PageIdx page;
  PageEncoding encoding = PageEncoding::kInt2;
  // The session's heads of the image, contiguous: [kv_head][layer].
  std::span<std::byte> bytes;
};

struct PublishPlan {
  PublishId id;
  // Ascending by page, INT2 before BF16 of one page. Empty: everything is there already.
  std::vector<WritableBlock> missing;
};

// What was written to one block of the plan.
struct WrittenBlock {
  PageIdx page;
  PageEncoding encoding = PageEncoding::kInt2;
  std::vector<uint32_t> head_crc32c;  // Of each of the session's heads, over the stored bytes.
};

struct CommitResult {
  uint32_t pages_added = 0;
  uint32_t pages_present = 0;
};

}  // namespace crumb
