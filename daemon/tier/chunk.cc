// SPDX-License-Identifier: Apache-2.0
#include "daemon/tier/chunk.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <functional>
#include <string>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

#include "proto/base/check.h"
#include "proto/base/huge_page.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010  // Linux 5.1; absent from older C libraries.
#endif

// shared: the header says by whom.

namespace crumb {
namespace {

absl::Status SystemError(absl::string_view call, size_t bytes) {
  const int error = errno;
  absl::string_view remedy = "check the machine's memory and the service's limit of it";
  if (error == EMFILE || error == ENFILE) {
    remedy = "raise the limit of open files (LimitNOFILE, ulimit -n), or [store] chunk";
  } else if (error == ENOMEM) {
    remedy = "lower [store] capacity, or raise the service's limit of memory or address space";
  } else if (error == EINVAL || error == ENOSYS) {
    remedy = "Linux 5.1 or newer is needed";
  }
  return absl::ResourceExhaustedError(absl::StrCat("chunk of ", bytes, " bytes: ", call, ": ",
                                                   std::generic_category().message(error), "; ",
                                                   remedy));
}

// Every field but generation and heads is written while the generation is odd, so a plain copy is
// all they need; these two are read while others may change them.
uint64_t LoadAcquire(const uint64_t& field) {
  return std::atomic_ref<uint64_t>(const_cast<uint64_t&>(field)).load(std::memory_order_acquire);
}
void StoreRelease(uint64_t* field, uint64_t value) {
  std::atomic_ref<uint64_t>(*field).store(value, std::memory_order_release);
}

}  // namespace

size_t Chunk::MemfdBytes(const ChunkSpec& spec) {
  return spec.segment.has_value() ? spec.layout.block_offset(0) : spec.layout.total_bytes();
}

absl::StatusOr<std::unique_ptr<Chunk>> Chunk::Create(ChunkId id, const ChunkSpec& spec) {
  const size_t bytes = MemfdBytes(spec);
  const std::string name =
      absl::StrCat(spec.segment.has_value() ? "crumb-copies-" : "crumb-chunk-", id.value());
  UniqueFd fd(::memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.is_valid()) {
    return SystemError("memfd_create", bytes);
  }
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    return SystemError("ftruncate", bytes);
  }
  void* memory = MapAtHugePage(fd.get(), bytes, PROT_READ | PROT_WRITE);
  if (memory == MAP_FAILED) {
    return SystemError("mmap", bytes);
  }
  // After our own mapping: FUTURE_WRITE leaves that one writable, and no other.
  std::unique_ptr<Chunk> chunk(
      new Chunk(id, spec,
                std::make_shared<ChunkMemory>(std::move(fd),
                                              std::span(static_cast<std::byte*>(memory), bytes))));
  constexpr int kSeals = F_SEAL_FUTURE_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  if (::fcntl(chunk->memory_->memfd(), F_ADD_SEALS, kSeals) != 0) {
    return SystemError("sealing the memfd", bytes);
  }
  return chunk;
}

Chunk::Chunk(ChunkId id, const ChunkSpec& spec, std::shared_ptr<ChunkMemory> memory)
    : id_(id), spec_(spec), memory_(std::move(memory)), generations_(num_blocks(), 0) {
  free_.resize(num_blocks());
  for (uint32_t block = 0; block < num_blocks(); ++block) {
    free_[block] = num_blocks() - 1 - block;
  }
}

absl::StatusOr<UniqueFd> Chunk::Duplicate() const {
  UniqueFd copy(::fcntl(memory_->memfd(), F_DUPFD_CLOEXEC, 0));
  if (!copy.is_valid()) {
    return SystemError("duplicating its descriptor", bytes());
  }
  return copy;
}

PageHeader& Chunk::header(uint32_t block) {
  CRUMB_DCHECK(block < num_blocks(), "block outside of the chunk");
  return *reinterpret_cast<PageHeader*>(base() + ChunkLayout::header_offset(block));
}

std::span<std::byte> Chunk::Image(uint32_t block) {
  CRUMB_CHECK(!spec_.segment.has_value(), "images of copies lie in their tier");
  CRUMB_CHECK(block < num_blocks(), "block outside of the chunk");
  return {base() + spec_.layout.block_offset(block), spec_.layout.image_bytes};
}

FreshMemory Chunk::Fresh(uint32_t block, size_t offset) const {
  CRUMB_CHECK(block < num_blocks(), "block outside of the chunk");
  // Settled once, and every page of it has been touched. Who gave it back before that may have
  // touched some; asking for those again costs little.
  return generations_[block] > 1 || memory_->is_populated()
             ? FreshMemory{}
             : FreshMemory{memory_->memfd(), spec_.layout.block_offset(block) + offset,
                           &memory_->units()};
}

void Chunk::MoveGeneration(uint32_t block) {
  // An exchange, because its acquire half keeps the writes to the block's bytes that follow from
  // being seen before the odd generation is; a store would not.
  std::atomic_ref<uint64_t>(header(block).generation)
      .exchange(++generations_[block], std::memory_order_acq_rel);
}

uint32_t Chunk::Take() {
  CRUMB_CHECK(!free_.empty(), "no free block");
  const uint32_t block = free_.back();
  free_.pop_back();
  if (generations_[block] % 2 == 0) {
    MoveGeneration(block);
  }
  StoreRelease(&header(block).heads_present, 0);
  return block;
}

void Chunk::GiveBack(uint32_t block) {
  if (generations_[block] % 2 == 0) {
    MoveGeneration(block);
  }
  // Keeps the stack in order, mostly for free: blocks of one prefix go from its end.
  const auto place = std::upper_bound(free_.begin(), free_.end(), block, std::greater<>());
  CRUMB_CHECK(place == free_.begin() || *(place - 1) != block, "block given back twice");
  free_.insert(place, block);
}

void Chunk::StoreHeads(PageHeader* target,
                       uint64_t heads,
                       std::span<const uint32_t, Geometry::kMaxKvHeads> head_crc32c) {
  for (uint32_t head = 0; head < Geometry::kMaxKvHeads; ++head) {
    if (((heads >> head) & 1) != 0) {
      std::atomic_ref<uint32_t>(target->head_crc32c[head])
          .store(head_crc32c[head], std::memory_order_relaxed);
    }
  }
  // Releases the checksums, and the bytes before them, to a reader that finds the bits.
  StoreRelease(&target->heads_present, LoadAcquire(target->heads_present) | heads);
}

void Chunk::Settle(uint32_t block,
                   PageIdx page,
                   uint64_t heads,
                   std::span<const uint32_t, Geometry::kMaxKvHeads> head_crc32c) {
  CRUMB_CHECK(generations_[block] % 2 == 1, "settled twice");
  PageHeader& target = header(block);
  target.magic = PageHeader::kMagic;
  target.format_version = kPageFormatVersion;
  target.encoding = spec_.encoding;
  target.first_token = page.value() * kPageTokens;
  target.valid_tokens = kPageTokens;
  target.profile_id = spec_.profile_id.bytes;
  target.namespace_id = spec_.namespace_id.bytes;
  StoreHeads(&target, heads, head_crc32c);
  StoreRelease(&target.generation, ++generations_[block]);
}

void Chunk::AddHeads(uint32_t block,
                     uint64_t heads,
                     std::span<const uint32_t, Geometry::kMaxKvHeads> head_crc32c) {
  CRUMB_CHECK(generations_[block] % 2 == 0, "not settled yet");
  PageHeader& target = header(block);
  CRUMB_CHECK((LoadAcquire(target.heads_present) & heads) == 0, "heads that are there already");
  StoreHeads(&target, heads, head_crc32c);
}

PageHeader Chunk::Header(uint32_t block) const {
  CRUMB_CHECK(block < num_blocks(), "block outside of the chunk");
  const auto& source =
      *reinterpret_cast<const PageHeader*>(base() + ChunkLayout::header_offset(block));
  PageHeader copy = source;
  copy.generation = generations_[block];
  return copy;
}

}  // namespace crumb
