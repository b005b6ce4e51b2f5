// SPDX-License-Identifier: Apache-2.0
//
// A store, a clock and one session that holds all heads.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "daemon/store/page_store.h"
#include "proto/page/chunk_layout.h"
#include "proto/page/namespace_id.h"
#include "tests/support/fake_clock.h"
#include "tests/support/store_testing.h"

namespace crumb {

class StoreFixture : public ::testing::Test {
 protected:
  static constexpr HeadRange kAllHeads{0, 4};
  static inline const Geometry kGeometry = SmallPageProfile().geometry;

  void SetUp() override { Restart({}); }
  void TearDown() override { ASSERT_EQ(absl::OkStatus(), store_->CheckInvariants()); }

  void Restart(const StoreOptions& options) {
    auto store = PageStore::Create(options, clock_);
    ASSERT_EQ(absl::OkStatus(), store.status());
    store_ = *std::move(store);
    session_ = Attach();
  }
  // Blocks that one publish takes.
  struct Blocks {
    uint32_t int2 = 0;
    uint32_t bf16 = 0;
  };
  // With room for these publishes, one after the other, and nothing more.
  void RestartWithRoomFor(std::initializer_list<Blocks> publishes) {
    StoreOptions options;
    options.chunk_bytes = size_t{64} << 10;  // Seven INT2 blocks, or one of BF16.
    options.capacity_bytes = 0;
    for (const Blocks& blocks : publishes) {
      options.capacity_bytes += ChunkBytes(PageEncoding::kInt2, blocks.int2, options.chunk_bytes) +
                                ChunkBytes(PageEncoding::kBf16, blocks.bf16, options.chunk_bytes);
    }
    Restart(options);
  }
  static size_t ChunkBytes(PageEncoding encoding, uint32_t blocks, size_t chunk_bytes) {
    const uint32_t max = ChunkLayout::Fit(kGeometry, encoding, chunk_bytes).num_blocks;
    const size_t image = kGeometry.PageBytes(encoding);
    return blocks / max * ChunkLayout{image, max}.total_bytes() +
           (blocks % max != 0 ? ChunkLayout{image, blocks % max}.total_bytes() : 0);
  }

  SessionId Attach(std::string tenant = "default", HeadRange heads = {}) {
    const auto session = store_->OpenSession(SmallSession(std::move(tenant), heads));
    EXPECT_EQ(absl::OkStatus(), session.status());
    return session.value_or(SessionId());
  }
  absl::StatusOr<CommitResult> TryPublish(std::string_view letters) {
    return PublishAll(store_.get(), session_, "", PagesOf(letters));
  }
  void Publish(std::string_view letters) {
    ASSERT_EQ(absl::OkStatus(), TryPublish(letters).status()) << letters;
  }
  // A prompt of these pages and `extra` tokens.
  LookupResult Lookup(std::string_view letters, uint32_t extra = 1, bool allow_int2 = false) {
    auto result = store_->Lookup(session_, "", PromptOf(letters, extra), allow_int2);
    EXPECT_EQ(absl::OkStatus(), result.status());
    return result.ok() ? *std::move(result) : LookupResult{};
  }
  void Release(const LookupResult& found) {
    ASSERT_EQ(absl::OkStatus(), store_->ReleaseLeases(session_, {{found.lease}}));
  }
  // Pages that a session finds, with no effect on anything.
  uint32_t Matched(std::string_view letters) { return MatchedBy(session_, letters); }
  uint32_t MatchedBy(SessionId session, std::string_view letters) {
    const auto found = store_->Probe(session, "", PromptOf(letters, 1));
    EXPECT_EQ(absl::OkStatus(), found.status());
    return found.ok() ? found->matched_tokens / kPageTokens : 0;
  }
  static NamespaceId Namespace(std::string_view tenant = "default", std::string_view key = "") {
    return ComputeNamespaceId(tenant, SmallPageProfile().id, key);
  }
  static PageKey Int2(uint32_t page) { return {PageIdx(page), PageEncoding::kInt2}; }
  static PageKey Bf16(uint32_t page) { return {PageIdx(page), PageEncoding::kBf16}; }
  // As written by nobody: for tests in which bytes do not matter.
  static std::vector<WrittenBlock> Unwritten(const std::vector<PageKey>& keys, size_t heads = 4) {
    std::vector<WrittenBlock> blocks;
    for (const PageKey& key : keys) {
      blocks.push_back({key.page, key.encoding, std::vector<uint32_t>(heads)});
    }
    return blocks;
  }

  FakeClock clock_;
  std::unique_ptr<PageStore> store_;
  SessionId session_;
};

// The message must name the thing, the value, the limit or the remedy: each of these words.
#define EXPECT_REFUSED(expected_code, status, ...)                                   \
  do {                                                                               \
    const absl::Status crumb_status = (status);                                      \
    EXPECT_EQ(absl::StatusCode::expected_code, crumb_status.code()) << crumb_status; \
    for (const std::string& word : std::vector<std::string>{__VA_ARGS__}) {          \
      EXPECT_THAT(crumb_status.message(), ::testing::HasSubstr(word));               \
    }                                                                                \
  } while (false)

}  // namespace crumb
