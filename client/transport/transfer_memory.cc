// SPDX-License-Identifier: Apache-2.0
#include "client/transport/transfer_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"

#include "proto/base/status_macros.h"

namespace crumb {

absl::StatusOr<AnonymousMemory> AnonymousMemory::Map(size_t bytes) {
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) {
    const absl::Status why =
        absl::ErrnoToStatus(errno, absl::StrCat("memory for transfers: mmap of ", bytes, " bytes"));
    return absl::ResourceExhaustedError(why.message());
  }
  // Only advice: without huge pages everything works, slower.
  static_cast<void>(madvise(address, bytes, MADV_HUGEPAGE));
  AnonymousMemory memory;
  memory.bytes_ = {static_cast<std::byte*>(address), bytes};
  return memory;
}

AnonymousMemory::AnonymousMemory(AnonymousMemory&& other) noexcept
    : bytes_(std::exchange(other.bytes_, {})) {}

AnonymousMemory& AnonymousMemory::operator=(AnonymousMemory&& other) noexcept {
  std::swap(bytes_, other.bytes_);
  return *this;
}

bool AnonymousMemory::Forget(size_t kept_bytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t kept = std::min((kept_bytes + page - 1) / page * page, bytes_.size());
  return kept == bytes_.size() ||
         madvise(bytes_.data() + kept, bytes_.size() - kept, MADV_DONTNEED) == 0;
}

AnonymousMemory::~AnonymousMemory() {
  if (!bytes_.empty()) {
    munmap(bytes_.data(), bytes_.size());
  }
}

struct ChunkPool::Core {
  Core(AnonymousMemory all, size_t num, size_t bytes)
      : memory(std::move(all)), num_chunks(num), chunk_bytes(bytes) {
    // The chunk that was used last is used first: it may still be in the cache.
    for (size_t chunk = num; chunk-- > 0;) {
      free.push_back(memory.bytes().subspan(chunk * bytes, bytes));
    }
  }
  bool HasFree() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) { return !free.empty(); }

  const AnonymousMemory memory;
  const size_t num_chunks;
  const size_t chunk_bytes;
  absl::Mutex mutex;
  std::vector<std::span<std::byte>> free ABSL_GUARDED_BY(mutex);
};

// shared: see the members.
ChunkPool::Chunk::Chunk(std::shared_ptr<Core> core, std::span<std::byte> bytes)
    : core_(std::move(core)), bytes_(bytes) {}

ChunkPool::Chunk::Chunk(Chunk&& other) noexcept
    : core_(std::move(other.core_)), bytes_(std::exchange(other.bytes_, {})) {}

ChunkPool::Chunk::~Chunk() {
  if (core_ != nullptr) {
    const absl::MutexLock lock(&core_->mutex);
    core_->free.push_back(bytes_);
  }
}

absl::StatusOr<ChunkPool> ChunkPool::Create(size_t num_chunks, size_t chunk_bytes) {
  CRUMB_ASSIGN_OR_RETURN(AnonymousMemory memory, AnonymousMemory::Map(num_chunks * chunk_bytes));
  return ChunkPool(std::make_shared<Core>(std::move(memory), num_chunks, chunk_bytes));
}

ChunkPool::ChunkPool(std::shared_ptr<Core> core) : core_(std::move(core)) {}

size_t ChunkPool::chunk_bytes() const {
  return core_->chunk_bytes;
}

size_t ChunkPool::num_chunks() const {
  return core_->num_chunks;
}

std::optional<ChunkPool::Chunk> ChunkPool::TryTake(size_t reserve) {
  const absl::MutexLock lock(&core_->mutex);
  if (core_->free.size() <= reserve) {
    return std::nullopt;
  }
  Chunk chunk(core_, core_->free.back());
  core_->free.pop_back();
  return chunk;
}

std::optional<ChunkPool::Chunk> ChunkPool::Take(absl::Duration timeout) {
  const absl::MutexLock lock(&core_->mutex);
  if (!core_->mutex.AwaitWithTimeout(absl::Condition(core_.get(), &Core::HasFree), timeout)) {
    return std::nullopt;
  }
  Chunk chunk(core_, core_->free.back());
  core_->free.pop_back();
  return chunk;
}

struct BufferPool::Core {
  explicit Core(size_t max_kept) : max_kept_bytes(max_kept) {}

  const size_t max_kept_bytes;
  absl::Mutex mutex;
  std::vector<Kept> kept ABSL_GUARDED_BY(mutex);
  size_t kept_bytes ABSL_GUARDED_BY(mutex) = 0;
};

BufferPool::Buffer::Buffer(std::weak_ptr<Core> core, Kept kept)
    : core_(std::move(core)), kept_(std::move(kept)) {}

BufferPool::Buffer::~Buffer() {
  const size_t size = bytes().size();
  const std::shared_ptr<Core> core = core_.lock();
  if (core == nullptr || size == 0) {
    return;
  }
  const absl::MutexLock lock(&core->mutex);
  if (core->kept_bytes + size <= core->max_kept_bytes) {
    core->kept_bytes += size;
    core->kept.push_back(std::move(kept_));
  }
}

BufferPool::BufferPool(size_t max_kept_bytes) : core_(std::make_shared<Core>(max_kept_bytes)) {}

absl::StatusOr<BufferPool::Buffer> BufferPool::Take(size_t bytes) {
  {
    const absl::MutexLock lock(&core_->mutex);
    // The smallest that is large enough, unless most of it would lie idle.
    auto best = core_->kept.end();
    for (auto kept = core_->kept.begin(); kept != core_->kept.end(); ++kept) {
      const size_t size = kept->memory.bytes().size();
      if (size >= bytes && size / 2 <= bytes &&
          (best == core_->kept.end() || size < best->memory.bytes().size())) {
        best = kept;
      }
    }
    if (best != core_->kept.end()) {
      Kept kept = std::move(*best);
      core_->kept.erase(best);
      core_->kept_bytes -= kept.memory.bytes().size();
      return Buffer(core_, std::move(kept));
    }
  }
  CRUMB_ASSIGN_OR_RETURN(AnonymousMemory memory, AnonymousMemory::Map(bytes));
  return Buffer(core_, {std::move(memory), nullptr});
}

}  // namespace crumb
