// SPDX-License-Identifier: Apache-2.0
#include "daemon/store/page_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/fake_clock.h"
#include "tests/support/store_testing.h"

namespace crumb {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

const Geometry kGeometry = SmallPageProfile().geometry;
constexpr HeadRange kAllHeads{0, 4};

class PageStoreTest : public ::testing::Test {
 protected:
  void SetUp() override { Restart({}); }
  void TearDown() override { ASSERT_EQ(absl::OkStatus(), store_->CheckInvariants()); }

  void Restart(const StoreOptions& options) {
    auto store = PageStore::Create(options, clock_);
    ASSERT_EQ(absl::OkStatus(), store.status());
    store_ = *std::move(store);
    session_ = *store_->OpenSession(SmallSession());
  }
  CommitResult Publish(std::string_view letters) {
    const auto result = PublishAll(store_.get(), session_, "", PagesOf(letters));
    EXPECT_EQ(absl::OkStatus(), result.status());
    return result.value_or(CommitResult{});
  }
  LookupResult Lookup(const std::vector<uint32_t>& tokens) {
    auto result = store_->Lookup(session_, "", tokens, false);
    EXPECT_EQ(absl::OkStatus(), result.status());
    return result.ok() ? *std::move(result) : LookupResult{};
  }

  FakeClock clock_;
  std::unique_ptr<PageStore> store_;
  SessionId session_;
};

TEST_F(PageStoreTest, FindsWhatWasPublishedWithItsBytes) {
  EXPECT_EQ(4u, Publish("abcd").pages_added);
  const auto prompt = PromptOf("abcd", 5);
  const LookupResult found = Lookup(prompt);
  EXPECT_EQ(256u, found.length.matched_tokens);
  EXPECT_EQ(256u, found.length.usable_tokens);
  EXPECT_EQ(0u, found.length.trimmed_tokens);
  ASSERT_EQ(4u, found.pages.size());
  EXPECT_FALSE(found.pages[0].int2.has_value());  // The sink.
  EXPECT_TRUE(found.pages[0].bf16.has_value());
  EXPECT_TRUE(found.pages[1].int2.has_value());
  EXPECT_FALSE(found.pages[1].bf16.has_value());
  EXPECT_TRUE(found.pages[2].int2.has_value());  // The recent window: two pages before token 261.
  EXPECT_TRUE(found.pages[2].bf16.has_value());
  EXPECT_TRUE(found.pages[3].bf16.has_value());

  const std::vector<PageKey> keys = {{PageIdx(0), PageEncoding::kBf16},
                                     {PageIdx(1), PageEncoding::kInt2},
                                     {PageIdx(3), PageEncoding::kBf16}};
  const auto read = store_->BeginRead(session_, found.lease, keys);
  ASSERT_EQ(absl::OkStatus(), read.status());
  for (const PinnedPage& page : read->pages()) {
    EXPECT_TRUE(BlockHolds(page, "", prompt, kAllHeads, kGeometry));
  }
}

}  // namespace
}  // namespace crumb
