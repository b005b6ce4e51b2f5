// SPDX-License-Identifier: Apache-2.0
//
// What tests of the page store have in common: a small model, prompts made of pages, and page bytes
// that say what they are.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

#include "daemon/store/page_store.h"

namespace crumb {

// 1 layer, 4 KV heads, head_dim 32, sink of one page, recent window of two.
PageProfile SmallPageProfile(uint8_t id = 1);
SessionSpec SmallSession(std::string tenant = "default", HeadRange heads = {});

// A prompt of one page a letter: equal letters, equal pages.
std::vector<uint32_t> PagesOf(std::string_view letters);
// The same with `extra` tokens more than whole pages.
std::vector<uint32_t> PromptOf(std::string_view letters, uint32_t extra);

// Of the bytes of one head of one page of a prefix: 64 bits that no other head, page, encoding,
// prefix or salt has.
uint64_t HeadSignature(std::string_view salt,
                       std::span<const uint32_t> prefix,
                       PageEncoding encoding,
                       uint32_t head);
// Fills the bytes of one head's range with its signature; compares them.
void FillHead(uint64_t signature, std::span<std::byte> range);
bool HeadHolds(uint64_t signature, std::span<const std::byte> range);

// Writes a block of a publish of `tokens`, as an engine with `heads` would.
WrittenBlock WriteBlock(const WritableBlock& block,
                        std::string_view salt,
                        std::span<const uint32_t> tokens,
                        HeadRange heads,
                        const Geometry& geometry);
// True if the block holds what WriteBlock wrote, and its header says so.
bool BlockHolds(const PinnedPage& page,
                std::string_view salt,
                std::span<const uint32_t> tokens,
                HeadRange heads,
                const Geometry& geometry);

// Begin, write all and commit.
absl::StatusOr<CommitResult> PublishAll(PageStore* store,
                                        SessionId session,
                                        std::string_view context_key,
                                        std::span<const uint32_t> tokens,
                                        HeadRange heads = {0, 4},
                                        const Geometry& geometry = SmallPageProfile().geometry);

}  // namespace crumb
