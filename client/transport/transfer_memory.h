// SPDX-License-Identifier: Apache-2.0
//
// Memory that transfers read and write. It is handed out as handles which a transfer's `done`
// keeps, so that it cannot be reused or unmapped before the transfer has ended, whoever else lost
// interest by then. Both pools reuse memory, since first touching it costs more than a transfer.
//
// All classes here but the handles are Thread-safe; handles are Thread-compatible.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace crumb {

// Anonymous memory of this process, page-aligned, zero at first, in huge pages where the system
// gives them. Move-only.
class AnonymousMemory {
 public:
  // RESOURCE_EXHAUSTED, with the size, when the system has none. Physical pages are taken at their
  // first use.
  static absl::StatusOr<AnonymousMemory> Map(size_t bytes);
  AnonymousMemory() = default;
  AnonymousMemory(AnonymousMemory&& other) noexcept;
  AnonymousMemory& operator=(AnonymousMemory&& other) noexcept;
  AnonymousMemory(const AnonymousMemory&) = delete;
  AnonymousMemory& operator=(const AnonymousMemory&) = delete;
  ~AnonymousMemory();

  std::span<std::byte> bytes() const { return bytes_; }
  // Gives the physical pages beyond the first `kept_bytes` back to the system; they are zero when
  // they are used next. False: the system refused, which it does not for memory of Map.
  bool Forget(size_t kept_bytes);

 private:
  std::span<std::byte> bytes_;
};

// A fixed number of chunks of one size: what a sender's messages are gathered into.
class ChunkPool {
  struct Core;

 public:
  // One chunk of the pool, given back when destroyed. Move-only; may outlive the pool.
  class Chunk {
   public:
    Chunk(Chunk&& other) noexcept;
    Chunk& operator=(Chunk&&) = delete;
    Chunk(const Chunk&) = delete;
    Chunk& operator=(const Chunk&) = delete;
    ~Chunk();
    std::span<std::byte> bytes() const { return bytes_; }

   private:
    friend class ChunkPool;
    Chunk(std::shared_ptr<Core> core, std::span<std::byte> bytes);
    std::shared_ptr<Core> core_;  // shared: a leaked transfer's chunk outlives the pool.
    std::span<std::byte> bytes_;
  };

  static absl::StatusOr<ChunkPool> Create(size_t num_chunks, size_t chunk_bytes);

  size_t chunk_bytes() const;
  size_t num_chunks() const;
  // A chunk, if more than `reserve` chunks are free. What was in it before is still there.
  std::optional<Chunk> TryTake(size_t reserve = 0);
  // Waits for one, at most `timeout`.
  std::optional<Chunk> Take(absl::Duration timeout);

 private:
  explicit ChunkPool(std::shared_ptr<Core> core);
  std::shared_ptr<Core> core_;
};

// Buffers of any size, of which some are kept for the next taker.
class BufferPool {
  struct Core;

 public:
  // Stays with a buffer's memory from taker to taker, until that goes back to the system: what a
  // device knows of it, for instance.
  class Companion {
   public:
    virtual ~Companion() = default;
  };

 private:
  struct Kept {
    AnonymousMemory memory;
    std::unique_ptr<Companion> companion;  // Goes first.
  };

 public:
  class Buffer {
   public:
    Buffer(Buffer&& other) noexcept = default;
    Buffer& operator=(Buffer&&) = delete;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer();
    // At least as many as asked for.
    std::span<std::byte> bytes() const { return kept_.memory.bytes(); }
    // Null: none yet.
    const Companion* companion() const { return kept_.companion.get(); }
    void SetCompanion(std::unique_ptr<Companion> companion) {
      kept_.companion = std::move(companion);
    }

   private:
    friend class BufferPool;
    Buffer(std::weak_ptr<Core> core, Kept kept);
    std::weak_ptr<Core> core_;
    Kept kept_;
  };

  // Keeps at most `max_kept_bytes` that no one uses.
  explicit BufferPool(size_t max_kept_bytes);
  absl::StatusOr<Buffer> Take(size_t bytes);

 private:
  std::shared_ptr<Core> core_;  // shared: buffers return to it if it is still there.
};

}  // namespace crumb
