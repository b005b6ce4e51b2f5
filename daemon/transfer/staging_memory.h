// SPDX-License-Identifier: Apache-2.0
//
// Where the bytes of pages that an engine publishes wait for their commit: the session's memfd,
// mapped, or memory of the daemon that UCX filled for one publish. Read-only here.
//
// The engine may change a memfd's bytes while they are read, so nothing read from it counts until
// it was copied and the copy checked. It cannot make a read fault: MapMemfd takes none that could
// shrink, and none of a file system that may have no page to give.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>

#include "absl/status/statusor.h"

namespace crumb {

// Thread-safe. Releases the memory when destroyed.
class StagingMemory {
 public:
  // shared: by the session and by the commits that still read it when the session ends or gives
  // another one.
  //
  // Maps the first `bytes` bytes of `memfd`; takes no ownership of the descriptor, and needs it no
  // longer on return. INVALID_ARGUMENT: not a memfd, of huge pages, not sealed against shrinking
  // and growing, of another size, empty, or larger than kMaxStagingBytes.
  static absl::StatusOr<std::shared_ptr<const StagingMemory>> MapMemfd(int memfd, uint64_t bytes);

  // Other memory, valid until `release` is called, once.
  StagingMemory(std::span<const std::byte> bytes, std::function<void()> release)
      : bytes_(bytes), release_(std::move(release)) {}
  ~StagingMemory() {
    device_hold_ = nullptr;  // Before what it is of.
    release_();
  }
  StagingMemory(const StagingMemory&) = delete;
  StagingMemory& operator=(const StagingMemory&) = delete;

  std::span<const std::byte> bytes() const { return bytes_; }

  // Whether a device holds the memory, and so reads it by itself: what `hold` returns, if that is
  // not null, is kept as long as this. Called once, by the first to ask, for which it may take
  // milliseconds; others do not wait for it, and are told that there is none yet. Of a memfd only:
  // memory of one publish is gone too soon to be worth it.
  bool IsHeldByDevice(const std::function<std::shared_ptr<const void>()>& hold) const;

 private:
  enum class Hold { kNotAsked, kBeingMade, kNone, kHeld };

  std::span<const std::byte> bytes_;
  std::function<void()> release_;
  bool is_kept_ = false;  // For many publishes.
  // device_hold_ is written by who takes hold_ from kNotAsked to kBeingMade, before kHeld.
  mutable std::atomic<Hold> hold_ = Hold::kNotAsked;
  mutable std::shared_ptr<const void> device_hold_;  // shared: only to hide what it is.
};

}  // namespace crumb
