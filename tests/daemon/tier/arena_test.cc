// SPDX-License-Identifier: Apache-2.0
#include "daemon/tier/arena.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>

namespace crumb {
namespace {

using ::testing::HasSubstr;

ChunkSpec SpecOf(uint32_t num_blocks) {
  ChunkSpec spec;
  spec.layout = {kChunkAlignment, num_blocks};
  return spec;
}
// One page of header table, one a block.
constexpr size_t kTwoBlocks = 3 * kChunkAlignment;

TEST(ArenaTest, ChunksNeverExceedTheCapacity) {
  Arena arena(2 * kTwoBlocks);
  ASSERT_EQ(absl::OkStatus(), arena.Add(SpecOf(2)).status());
  ASSERT_EQ(absl::OkStatus(), arena.Add(SpecOf(2)).status());
  EXPECT_EQ(0u, arena.free_bytes());
  const auto third = arena.Add(SpecOf(1));
  EXPECT_EQ(absl::StatusCode::kResourceExhausted, third.status().code());
  EXPECT_THAT(third.status().message(), HasSubstr("24576 of 24576"));
  EXPECT_THAT(third.status().message(), HasSubstr("[store] capacity"));
  EXPECT_EQ(2u, arena.num_chunks());
}

TEST(ArenaTest, RemovedChunkGivesItsBytesBackAndItsIdNever) {
  Arena arena(kTwoBlocks);
  Chunk* const first = *arena.Add(SpecOf(2));
  const ChunkId id = first->id();
  EXPECT_EQ(first, arena.Find(id));
  const std::unique_ptr<Chunk> removed = arena.Remove(id);
  EXPECT_EQ(nullptr, arena.Find(id));
  EXPECT_EQ(kTwoBlocks, arena.free_bytes());
  EXPECT_NE(id, (*arena.Add(SpecOf(2)))->id());
}

TEST(ArenaTest, EmptyChunkThatIsPutBackIsTheSameOne) {
  Arena arena(kTwoBlocks);
  Chunk* const chunk = *arena.Add(SpecOf(2));
  const ChunkId id = chunk->id();
  EXPECT_EQ(chunk, arena.PutBack(arena.Remove(id)));
  EXPECT_EQ(chunk, arena.Find(id));
  EXPECT_EQ(0u, arena.free_bytes());
}

TEST(ArenaTest, ChunkInUseMustStay) {
  Arena arena(kTwoBlocks);
  Chunk* const chunk = *arena.Add(SpecOf(2));
  chunk->Take();
  EXPECT_DEATH(arena.Remove(chunk->id()), "chunk in use");
}

}  // namespace
}  // namespace crumb
