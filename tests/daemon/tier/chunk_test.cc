// SPDX-License-Identifier: Apache-2.0
#include "daemon/tier/chunk.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

namespace crumb {
namespace {

using ::testing::HasSubstr;

constexpr Geometry kGeometry{.num_layers = 1, .num_kv_heads = 2, .key_dim = 32, .value_dim = 32};
constexpr std::array<uint32_t, Geometry::kMaxKvHeads> kChecksums = {111, 222};

ChunkSpec Spec(uint32_t num_blocks) {
  ChunkSpec spec{.namespace_id = {},
                 .profile_id = {},
                 .encoding = PageEncoding::kInt2,
                 .layout = {kGeometry.PageBytes(PageEncoding::kInt2), num_blocks}};
  spec.namespace_id.bytes.fill(7);
  spec.profile_id.bytes.fill(8);
  return spec;
}

class ChunkTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto chunk = Chunk::Create(ChunkId(3), Spec(4));
    ASSERT_EQ(absl::OkStatus(), chunk.status());
    chunk_ = *std::move(chunk);
    auto fd = chunk_->Duplicate();
    ASSERT_EQ(absl::OkStatus(), fd.status());
    fd_ = *std::move(fd);
  }
  // As a reader maps it, with what the reader finds in the header table.
  const std::byte* MapReadOnly() {
    void* memory = ::mmap(nullptr, chunk_->bytes(), PROT_READ, MAP_SHARED, fd_.get(), 0);
    EXPECT_NE(MAP_FAILED, memory) << std::strerror(errno);
    return static_cast<const std::byte*>(memory);
  }
  static const PageHeader& HeaderIn(const std::byte* memory, uint32_t block) {
    return *reinterpret_cast<const PageHeader*>(memory + ChunkLayout::header_offset(block));
  }
  int ErrorOfWritableMap(int fd) const {
    void* memory = ::mmap(nullptr, chunk_->bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return memory == MAP_FAILED ? errno : 0;
  }

  std::unique_ptr<Chunk> chunk_;
  UniqueFd fd_;
};

TEST_F(ChunkTest, NoOneElseCanMapItWritable) {
  EXPECT_EQ(EPERM, ErrorOfWritableMap(fd_.get()));
  // A read-only map cannot be made writable afterwards either.
  void* memory = const_cast<std::byte*>(MapReadOnly());
  EXPECT_EQ(-1, ::mprotect(memory, chunk_->bytes(), PROT_READ | PROT_WRITE));
  EXPECT_EQ(EACCES, errno);
  ::munmap(memory, chunk_->bytes());
  // Nor by opening the file anew for writing.
  const std::string path = "/proc/self/fd/" + std::to_string(fd_.get());
  UniqueFd reopened(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (reopened.is_valid()) {
    EXPECT_EQ(EPERM, ErrorOfWritableMap(reopened.get()));
  }
}

TEST_F(ChunkTest, AnotherProcessCannotMapItWritable) {
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    // The map that was inherited from the daemon is not what a client has; the descriptor is.
    ::_exit(ErrorOfWritableMap(fd_.get()) == EPERM ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(child, ::waitpid(child, &status, 0));
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(0, WEXITSTATUS(status));
}

TEST_F(ChunkTest, NoOneCanWriteResizeOrUnsealIt) {
  EXPECT_EQ(-1, ::pwrite(fd_.get(), "x", 1, 0));
  EXPECT_EQ(EPERM, errno);
  EXPECT_EQ(-1, ::ftruncate(fd_.get(), 4096));
  EXPECT_EQ(EPERM, errno);
  EXPECT_EQ(-1, ::ftruncate(fd_.get(), static_cast<off_t>(chunk_->bytes()) + 4096));
  EXPECT_EQ(EPERM, errno);
  EXPECT_EQ(-1, ::fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096));
  EXPECT_EQ(EPERM, errno);
  EXPECT_EQ(-1, ::fcntl(fd_.get(), F_ADD_SEALS, F_SEAL_WRITE));
  EXPECT_EQ(EPERM, errno);
}

TEST_F(ChunkTest, ReaderSeesBytesAndHeaderOnceSettled) {
  const std::byte* const memory = MapReadOnly();
  const uint32_t block = chunk_->Take();
  EXPECT_EQ(1u, HeaderIn(memory, block).generation % 2);
  std::memset(chunk_->Image(block).data(), 0x5a, chunk_->Image(block).size());
  chunk_->Settle(block, PageIdx(9), 0b01, kChecksums);

  const PageHeader& header = HeaderIn(memory, block);
  EXPECT_EQ(absl::OkStatus(), CheckPageHeader(header, {.profile_id = chunk_->spec().profile_id,
                                                       .namespace_id = chunk_->spec().namespace_id,
                                                       .encoding = PageEncoding::kInt2,
                                                       .generation = chunk_->generation(block),
                                                       .page_idx = PageIdx(9)}));
  EXPECT_EQ(1u, header.heads_present);
  EXPECT_EQ(111u, header.head_crc32c[0]);
  EXPECT_EQ(std::byte{0x5a}, memory[chunk_->spec().layout.block_offset(block) + 100]);
  EXPECT_EQ(header, chunk_->Header(block));

  const uint64_t generation = header.generation;
  chunk_->AddHeads(block, 0b10, kChecksums);
  EXPECT_EQ(3u, header.heads_present);
  EXPECT_EQ(222u, header.head_crc32c[1]);
  EXPECT_EQ(generation, header.generation);
  ::munmap(const_cast<std::byte*>(memory), chunk_->bytes());
}

TEST_F(ChunkTest, GenerationMovesOnBeforeABlockIsUsedAgain) {
  const uint32_t block = chunk_->Take();
  chunk_->Settle(block, PageIdx(0), 1, kChecksums);
  const Generation first = chunk_->generation(block);
  EXPECT_EQ(0u, first.value() % 2);
  chunk_->GiveBack(block);
  EXPECT_EQ(first.value() + 1, chunk_->generation(block).value());
  ASSERT_EQ(block, chunk_->Take());
  EXPECT_EQ(first.value() + 1, chunk_->generation(block).value());
  EXPECT_EQ(0u, chunk_->Header(block).heads_present);
  chunk_->Settle(block, PageIdx(1), 2, kChecksums);
  EXPECT_EQ(first.value() + 2, chunk_->generation(block).value());
}

TEST_F(ChunkTest, TakesTheLowestFreeBlock) {
  EXPECT_EQ(0u, chunk_->Take());
  EXPECT_EQ(1u, chunk_->Take());
  EXPECT_EQ(2u, chunk_->Take());
  chunk_->GiveBack(1);
  chunk_->GiveBack(0);
  EXPECT_EQ(0u, chunk_->Take());
  EXPECT_EQ(1u, chunk_->Take());
  EXPECT_EQ(3u, chunk_->Take());
  EXPECT_EQ(0u, chunk_->num_free());
  EXPECT_DEATH(chunk_->Take(), "no free block");
  EXPECT_DEATH((chunk_->GiveBack(2), chunk_->GiveBack(2)), "given back twice");
}

TEST_F(ChunkTest, BlocksStartOnPagesOfTheMachine) {
  for (uint32_t block = 0; block < chunk_->num_blocks(); ++block) {
    EXPECT_EQ(0u, reinterpret_cast<uintptr_t>(chunk_->Image(block).data()) % kChunkAlignment);
  }
}

TEST_F(ChunkTest, SaysWhichLimitToRaiseWhenDescriptorsRunOut) {
  rlimit before{};
  ASSERT_EQ(0, ::getrlimit(RLIMIT_NOFILE, &before));
  rlimit none = before;
  none.rlim_cur = 0;
  ASSERT_EQ(0, ::setrlimit(RLIMIT_NOFILE, &none));
  const auto chunk = Chunk::Create(ChunkId(4), Spec(1));
  const auto copy = chunk_->Duplicate();
  ASSERT_EQ(0, ::setrlimit(RLIMIT_NOFILE, &before));
  EXPECT_EQ(absl::StatusCode::kResourceExhausted, chunk.status().code());
  EXPECT_THAT(chunk.status().message(), HasSubstr("memfd_create"));
  EXPECT_THAT(chunk.status().message(), HasSubstr("ulimit -n"));
  EXPECT_FALSE(copy.ok());
}

}  // namespace
}  // namespace crumb
