// SPDX-License-Identifier: Apache-2.0
#include "tests/support/store_testing.h"

#include <cstring>
#include <utility>

#include "absl/hash/hash.h"

#include "proto/base/crc32c.h"
#include "proto/base/status_macros.h"

namespace crumb {

PageProfile SmallPageProfile(uint8_t id) {
  PageProfile profile;
  profile.id.bytes.fill(id);
  profile.geometry = {.num_layers = 1, .num_kv_heads = 4, .key_dim = 32, .value_dim = 32};
  profile.windows = {.sink_tokens = kPageTokens, .recent_tokens = 2 * kPageTokens};
  return profile;
}

SessionSpec SmallSession(std::string tenant, HeadRange heads) {
  return {.client_name = "test",
          .pid = 1,
          .tenant = std::move(tenant),
          .profile = SmallPageProfile(),
          .heads = heads};
}

std::vector<uint32_t> PagesOf(std::string_view letters) {
  return PromptOf(letters, 0);
}

std::vector<uint32_t> PromptOf(std::string_view letters, uint32_t extra) {
  std::vector<uint32_t> tokens;
  for (const char letter : letters) {
    for (uint32_t i = 0; i < kPageTokens; ++i) {
      tokens.push_back(static_cast<uint32_t>(letter) * 1000 + i);
    }
  }
  for (uint32_t i = 0; i < extra; ++i) {
    tokens.push_back(1 + i);
  }
  return tokens;
}

uint64_t HeadSignature(std::string_view salt,
                       std::span<const uint32_t> prefix,
                       PageEncoding encoding,
                       uint32_t head) {
  const std::string_view bytes(reinterpret_cast<const char*>(prefix.data()), prefix.size_bytes());
  return absl::HashOf(salt, bytes, static_cast<int>(encoding), head);
}

void FillHead(uint64_t signature, std::span<std::byte> range) {
  for (size_t i = 0; i + sizeof(signature) <= range.size(); i += sizeof(signature)) {
    std::memcpy(&range[i], &signature, sizeof(signature));
  }
}

bool HeadHolds(uint64_t signature, std::span<const std::byte> range) {
  // Equal to itself moved by a word, and the first word is right.
  constexpr size_t kWord = sizeof(signature);
  return std::memcmp(range.data(), &signature, kWord) == 0 &&
         std::memcmp(range.data(), range.data() + kWord, range.size() - kWord) == 0;
}

WrittenBlock WriteBlock(const WritableBlock& block,
                        std::string_view salt,
                        std::span<const uint32_t> tokens,
                        HeadRange heads,
                        const Geometry& geometry) {
  WrittenBlock written{.page = block.key.page, .encoding = block.key.encoding, .head_crc32c = {}};
  const auto prefix = tokens.first((size_t{block.key.page.value()} + 1) * kPageTokens);
  const size_t range_bytes = geometry.HeadRangeBytes(block.key.encoding);
  for (uint32_t i = 0; i < heads.count; ++i) {
    const auto range = block.bytes.subspan(i * range_bytes, range_bytes);
    FillHead(HeadSignature(salt, prefix, block.key.encoding, heads.first + i), range);
    written.head_crc32c.push_back(Crc32c(range));
  }
  return written;
}

bool BlockHolds(const PinnedPage& page,
                std::string_view salt,
                std::span<const uint32_t> tokens,
                HeadRange heads,
                const Geometry& geometry) {
  const auto prefix = tokens.first((size_t{page.key.page.value()} + 1) * kPageTokens);
  const size_t range_bytes = geometry.HeadRangeBytes(page.key.encoding);
  for (uint32_t i = 0; i < heads.count; ++i) {
    const auto range = page.bytes.subspan(i * range_bytes, range_bytes);
    const uint32_t head = heads.first + i;
    if (!HeadHolds(HeadSignature(salt, prefix, page.key.encoding, head), range) ||
        page.header.head_crc32c[head] != Crc32c(range) ||
        ((page.header.heads_present >> head) & 1) == 0) {
      return false;
    }
  }
  return page.header.first_token == page.key.page.value() * kPageTokens &&
         page.header.encoding == page.key.encoding && page.header.generation % 2 == 0;
}

absl::StatusOr<CommitResult> PublishAll(PageStore* store,
                                        SessionId session,
                                        std::string_view context_key,
                                        std::span<const uint32_t> tokens,
                                        HeadRange heads,
                                        const Geometry& geometry) {
  CRUMB_ASSIGN_OR_RETURN(const PublishPlan plan, store->BeginPublish(session, context_key, tokens));
  std::vector<WrittenBlock> written;
  {
    CRUMB_ASSIGN_OR_RETURN(const WriteGuard guard, store->BeginWrite(session, plan.id));
    for (const WritableBlock& block : guard.blocks()) {
      written.push_back(WriteBlock(block, context_key, tokens, heads, geometry));
    }
  }
  return store->CommitPublish(session, plan.id, written);
}

}  // namespace crumb
