// SPDX-License-Identifier: Apache-2.0
//
// The memfd of one chunk, and this process's mapping of it. Apart from the chunk, since who
// prepares it for a device, which takes milliseconds, may outlive that.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>

#include "absl/status/status.h"

#include "daemon/tier/populate.h"
#include "proto/base/unique_fd.h"

namespace crumb {

// Thread-safe but for Prepare, which one thread calls, once.
class ChunkMemory {
 public:
  // What a device holds the memory by, so that it reads it by itself; null: it does not.
  using Holder = std::function<std::shared_ptr<const void>(std::span<const std::byte>)>;

  // `bytes` maps all of `memfd`, and is unmapped when this is destroyed.
  ChunkMemory(UniqueFd memfd, std::span<std::byte> bytes)
      : memfd_(std::move(memfd)), bytes_(bytes) {}
  ~ChunkMemory();
  ChunkMemory(const ChunkMemory&) = delete;
  ChunkMemory& operator=(const ChunkMemory&) = delete;

  HugeUnits& units() { return units_; }
  int memfd() const { return memfd_.get(); }
  std::span<std::byte> bytes() const { return bytes_; }
  // All of it has its memory from the system: no part is fresh.
  bool is_populated() const { return is_populated_.load(std::memory_order_relaxed); }

  // Has the system give all of the memory, in huge pages where it can, and then the device hold it.
  // RESOURCE_EXHAUSTED: there is not so much, now; nothing else is lost. Blocking.
  absl::Status Prepare(const Holder& hold);

 private:
  const UniqueFd memfd_;
  const std::span<std::byte> bytes_;
  HugeUnits units_{bytes_};
  std::atomic<bool> is_populated_ = false;  // Relaxed: the memory is the same either way.
  std::shared_ptr<const void> hold_;        // shared: only to hide what it is.
};

}  // namespace crumb
