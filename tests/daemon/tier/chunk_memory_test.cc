// SPDX-License-Identifier: Apache-2.0
#include "daemon/tier/chunk_memory.h"

#include <memory>
#include <utility>

#include "gtest/gtest.h"

#include "daemon/tier/chunk.h"

namespace crumb {
namespace {

constexpr Geometry kGeometry{.num_layers = 1, .num_kv_heads = 2, .key_dim = 32, .value_dim = 32};

std::unique_ptr<Chunk> MakeChunk() {
  auto chunk = Chunk::Create(ChunkId(1), {.namespace_id = {},
                                          .profile_id = {},
                                          .encoding = PageEncoding::kInt2,
                                          .layout = {kGeometry.PageBytes(PageEncoding::kInt2), 3}});
  EXPECT_TRUE(chunk.ok()) << chunk.status();
  return *std::move(chunk);
}

TEST(ChunkMemoryTest, PreparedMemoryHasNothingFresh) {
  const auto chunk = MakeChunk();
  const uint32_t block = chunk->Take();
  EXPECT_GE(chunk->Fresh(block, 0).memfd, 0);
  ASSERT_TRUE(chunk->memory()->Prepare([](auto) { return nullptr; }).ok());
  EXPECT_LT(chunk->Fresh(block, 0).memfd, 0);
}

TEST(ChunkMemoryTest, WhatWasWrittenBeforeItWasPreparedStays) {
  const auto chunk = MakeChunk();
  const uint32_t block = chunk->Take();
  chunk->Image(block).back() = std::byte{42};
  ASSERT_TRUE(chunk->memory()->Prepare([](auto) { return nullptr; }).ok());
  EXPECT_EQ(chunk->Image(block).back(), std::byte{42});
}

TEST(ChunkMemoryTest, HoldEndsWithTheLastOwnerAndBeforeTheMemory) {
  auto chunk = MakeChunk();
  std::shared_ptr<ChunkMemory> memory = chunk->memory();
  std::byte last{7};
  const auto status =
      memory->Prepare([&](std::span<const std::byte> bytes) -> std::shared_ptr<const void> {
        EXPECT_EQ(bytes.data(), memory->bytes().data());
        EXPECT_EQ(bytes.size(), chunk->bytes());
        return {bytes.data(), [&last, bytes](const std::byte*) { last = bytes.back(); }};
      });
  ASSERT_TRUE(status.ok()) << status;
  chunk = nullptr;
  EXPECT_EQ(last, std::byte{7}) << "given up while the memory has an owner";
  memory = nullptr;
  EXPECT_EQ(last, std::byte{0});
}

}  // namespace
}  // namespace crumb
