// SPDX-License-Identifier: Apache-2.0
//
// Pages that a test's daemon and its clients can both make: a profile of any geometry with identity
// rotations, and bytes that follow from a page's number.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "crumb/cuda/profile.h"
#include "proto/base/check.h"
#include "proto/page/geometry.h"
#include "proto/page/page_format.h"

namespace crumb::testing {

// Not for arithmetic: rotations are identities. `sink_pages` pages of each prefix are BF16.
inline std::shared_ptr<const Profile> MakeTransferProfile(const Geometry& geometry,
                                                          uint32_t sink_pages) {
  ProfileParts parts;
  parts.model = "transfer test";
  parts.geometry = geometry;
  parts.codec = CodecId::kOscarInt2;
  parts.windows = {.sink_tokens = sink_pages * kPageTokens, .recent_tokens = 0};
  const auto identities = [&](uint32_t dim) {
    std::vector<float> rotations(size_t{geometry.num_layers} * dim * dim);
    for (size_t layer = 0; layer < geometry.num_layers; ++layer) {
      for (size_t row = 0; row < dim; ++row) {
        rotations[(layer * dim + row) * dim + row] = 1;
      }
    }
    return rotations;
  };
  parts.key_rotation = identities(geometry.key_dim);
  parts.value_rotation = identities(geometry.value_dim);
  parts.key_clip.resize(geometry.NumHeadBlocks());
  parts.value_clip.resize(geometry.NumHeadBlocks());
  auto file = Profile::Serialize(parts);
  CRUMB_CHECK(file.ok(), std::string(file.status().message()).c_str());
  auto profile = Profile::Parse(*std::move(file));
  CRUMB_CHECK(profile.ok(), std::string(profile.status().message()).c_str());
  return *std::move(profile);
}

// The bytes of a head block: different for each page, encoding, layer, head and salt.
inline void FillBlock(std::span<std::byte> block,
                      uint32_t salt,
                      uint32_t page,
                      PageEncoding encoding,
                      uint32_t layer,
                      uint32_t kv_head) {
  uint64_t word =
      ((uint64_t{salt} << 20 ^ page) << 8 ^ static_cast<uint64_t>(encoding)) * 0x9e3779b97f4a7c15u ^
      (uint64_t{layer} << 8 ^ kv_head) * 0xbf58476d1ce4e5b9u;
  for (size_t offset = 0; offset + sizeof(word) <= block.size(); offset += sizeof(word)) {
    word = word * 6364136223846793005u + 1442695040888963407u;
    std::memcpy(&block[offset], &word, sizeof(word));
  }
}

// The image of a page with all its heads.
inline void FillPage(std::span<std::byte> image,
                     const Geometry& geometry,
                     uint32_t salt,
                     uint32_t page,
                     PageEncoding encoding) {
  for (uint32_t head = 0; head < geometry.num_kv_heads; ++head) {
    for (uint32_t layer = 0; layer < geometry.num_layers; ++layer) {
      FillBlock(image.subspan(geometry.HeadBlockOffset(encoding, layer, head),
                              geometry.HeadBlockBytes(encoding)),
                salt, page, encoding, layer, head);
    }
  }
}

// The tokens of a prefix: no two salts share a page.
inline std::vector<uint32_t> MakeTokens(uint32_t salt, uint32_t num_tokens) {
  std::vector<uint32_t> tokens(num_tokens);
  for (uint32_t position = 0; position < num_tokens; ++position) {
    tokens[position] = salt * 7919 + position % 997;
  }
  return tokens;
}

}  // namespace crumb::testing
