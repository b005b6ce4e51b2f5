// SPDX-License-Identifier: Apache-2.0
//
// The host arena's memory, prepared for a fake device by a thread of its own.
#include "daemon/promote/arena_holder.h"

#include <memory>
#include <thread>

#include "gtest/gtest.h"

#include "tests/support/fake_clock.h"
#include "tests/support/fake_copy_tier.h"
#include "tests/support/store_testing.h"

namespace crumb {
namespace {

class ArenaHolderTest : public testing::Test {
 protected:
  void Publish(std::string_view letters) {
    ASSERT_TRUE(PublishAll(store_.get(), session_, "", PagesOf(letters)).ok());
  }
  void WaitForHolds(int count) {
    const absl::Time deadline = Clock::System().Now() + absl::Seconds(20);
    while (tier_.num_holds != count && Clock::System().Now() < deadline) {
      std::this_thread::yield();
    }
    EXPECT_EQ(tier_.num_holds, count);
  }

  FakeClock clock_;
  FakeCopyTier tier_{size_t{1} << 20, 4};
  std::unique_ptr<PageStore> store_ = *PageStore::Create({}, clock_, &tier_);
  const SessionId session_ = *store_->OpenSession(SmallSession());
};

TEST_F(ArenaHolderTest, MemoryOfEachNewChunkIsHeldUntilTheChunkIsClosed) {
  ArenaHolder holder(*store_, tier_);
  Publish("abcd");
  WaitForHolds(2);  // One chunk of each encoding.
  const auto found = store_->Lookup(session_, "", PromptOf("abcd", 128), false);
  EXPECT_TRUE(found.ok() && found->pages.size() == 4u) << "the pages are as they were";
  ASSERT_TRUE(store_->ReleaseLeases(session_, {{found->lease}}).ok());
  CopyAll(store_.get(), &tier_);  // Gives the promotion's pin up.
  const auto evicted = store_->Evict(store_->Status().namespaces[0].id, {});
  ASSERT_TRUE(evicted.ok());
  EXPECT_EQ(evicted->evicted_pages, 4u);
  WaitForHolds(0);
}

TEST_F(ArenaHolderTest, DeviceThatHoldsNothingIsLeftInPeace) {
  tier_.refuses_to_hold = true;
  ArenaHolder holder(*store_, tier_);
  Publish("abcd");
  Publish("xyz");
  EXPECT_EQ(tier_.num_holds, 0);
}

TEST_F(ArenaHolderTest, StopsWhileChunksWait) {
  Publish("abcd");
  { const ArenaHolder holder(*store_, tier_); }
  Publish("xyz");
}

}  // namespace
}  // namespace crumb
