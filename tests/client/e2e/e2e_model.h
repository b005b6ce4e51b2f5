// SPDX-License-Identifier: Apache-2.0
//
// The model of end-to-end tests: a small profile, and prompts and activations that follow from a
// seed, so that two processes mean the same prefix.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "crumb/sequence.h"
#include "tests/client/sequence/sequence_testing.h"
#include "tests/support/test_profile.h"

namespace crumb {

inline constexpr uint32_t kE2eQueryHeads = 4;
inline constexpr uint32_t kE2eMaxTokens = 1024;

// Sink 64, recent 128 tokens; 2 layers, 2 KV heads, head_dim 64.
inline std::shared_ptr<const Profile> E2eProfile(uint32_t seed = 1) {
  return MakeTestProfile(
      {.geometry = {.num_layers = 2, .num_kv_heads = 2, .key_dim = 64, .value_dim = 64},
       .seed = seed});
}

inline std::vector<uint32_t> E2ePrompt(uint32_t seed, uint32_t num_tokens) {
  std::vector<uint32_t> tokens(num_tokens);
  for (uint32_t i = 0; i < num_tokens; ++i) {
    tokens[i] = seed * 100'003 + i * 7919 % 50'021;
  }
  return tokens;
}

// The engine's prefill of that prompt: a sequence of `num_tokens` tokens that keeps its tail.
inline std::unique_ptr<Sequence> E2eSequence(const std::shared_ptr<const Profile>& profile,
                                             const Activations& activations,
                                             uint32_t num_tokens) {
  auto sequence = *Sequence::Create({.profile = profile, .num_query_heads = kE2eQueryHeads});
  if (!sequence->RetainTail(num_tokens / kPageTokens * kPageTokens).ok()) {
    return nullptr;
  }
  while (sequence->length() < num_tokens) {
    const uint32_t count = std::min(64u, num_tokens - sequence->length());
    if (!RunChunk(sequence.get(), activations, count).ok()) {
      return nullptr;
    }
  }
  return sequence;
}

}  // namespace crumb
