// SPDX-License-Identifier: Apache-2.0
//
// Demotion of a head block for tests of what it writes.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "gtest/gtest.h"

#include "crumb/cuda/demote.h"
#include "tests/cuda/codec_testing.h"

namespace crumb {

inline size_t BlockBytes(const HeadParameters& head) {
  return Int2HeadBlock{head.key_dim, head.value_dim}.bytes();
}

inline std::vector<std::byte> MustDemote(const HeadParameters& head,
                                         std::span<const BFloat16> keys,
                                         std::span<const BFloat16> values,
                                         CpuPath path) {
  std::vector<std::byte> block(BlockBytes(head), std::byte{0xee});  // Nothing may depend on it.
  EXPECT_TRUE(DemoteHeadBlock(head, keys, values, block, path).ok());
  return block;
}

}  // namespace crumb
