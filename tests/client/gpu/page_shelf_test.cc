// SPDX-License-Identifier: Apache-2.0
#include "client/gpu/page_shelf.h"

#include <array>
#include <random>
#include <set>
#include <vector>

#include "gtest/gtest.h"

namespace crumb {
namespace {

constexpr size_t kPageBytes = 64;
constexpr uint32_t kPages = 20;

class PageShelfTest : public testing::Test {
 protected:
  std::array<std::byte, kPages* kPageBytes> memory_ = {};
  PageShelf shelf_{memory_.data(), kPageBytes, kPages};
};

TEST_F(PageShelfTest, TakesAllOrNothing) {
  std::vector<std::byte*> pages(kPages + 1, nullptr);
  EXPECT_FALSE(shelf_.Take(pages));
  EXPECT_EQ(shelf_.num_free(), kPages);
  EXPECT_EQ(pages[0], nullptr);
  pages.pop_back();
  EXPECT_TRUE(shelf_.Take(pages));
  EXPECT_EQ(shelf_.num_free(), 0u);
  EXPECT_TRUE(shelf_.Take({}));
}

TEST_F(PageShelfTest, EachPageHasOneHolderWhateverTheOrder) {
  std::mt19937 random(1);
  std::vector<std::byte*> held;
  for (int step = 0; step < 2000; ++step) {
    if (random() % 2 == 0) {
      std::vector<std::byte*> pages(random() % 5);
      const bool fits = pages.size() <= shelf_.num_free();
      ASSERT_EQ(shelf_.Take(pages), fits);
      if (fits) {
        held.insert(held.end(), pages.begin(), pages.end());
      }
    } else if (!held.empty()) {
      std::swap(held[random() % held.size()], held.back());
      shelf_.Return(held.back());
      held.pop_back();
    }
    const std::set<std::byte*> distinct(held.begin(), held.end());
    ASSERT_EQ(distinct.size(), held.size());
    ASSERT_EQ(shelf_.num_free() + held.size(), kPages);
    for (const std::byte* page : distinct) {
      ASSERT_EQ((page - memory_.data()) % static_cast<ptrdiff_t>(kPageBytes), 0);
    }
  }
}

TEST_F(PageShelfTest, SpoiledPageIsGoodAgainForTheNextHolder) {
  std::vector<std::byte*> pages(2);
  ASSERT_TRUE(shelf_.Take(pages));
  shelf_.Spoil(pages[0]);
  shelf_.Spoil(pages[0]);
  EXPECT_TRUE(shelf_.IsSpoiled(pages[0]));
  EXPECT_FALSE(shelf_.IsSpoiled(pages[1]));
  EXPECT_EQ(shelf_.num_spoiled(), 1u);
  shelf_.Return(pages[0]);
  EXPECT_EQ(shelf_.num_spoiled(), 0u);
  shelf_.Spoil(pages[0]);  // Its holder has gone.
  EXPECT_EQ(shelf_.num_spoiled(), 0u);
  std::vector<std::byte*> again(1);
  ASSERT_TRUE(shelf_.Take(again));
  EXPECT_EQ(again[0], pages[0]);
  EXPECT_FALSE(shelf_.IsSpoiled(again[0]));
}

using PageShelfDeathTest = PageShelfTest;

TEST_F(PageShelfDeathTest, PageThatIsReturnedTwiceOrIsNotItsOwnEndsTheProgram) {
  std::vector<std::byte*> pages(1);
  ASSERT_TRUE(shelf_.Take(pages));
  shelf_.Return(pages[0]);
  EXPECT_DEATH(shelf_.Return(pages[0]), "returned once");
  EXPECT_DEATH(shelf_.Return(pages[0] + 1), "of this shelf");
  EXPECT_DEATH(shelf_.Return(memory_.data() + memory_.size()), "of this shelf");
}

}  // namespace
}  // namespace crumb
