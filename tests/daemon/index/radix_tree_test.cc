// SPDX-License-Identifier: Apache-2.0
#include "daemon/index/radix_tree.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <string_view>

#include "tests/daemon/index/letter_pages.h"

namespace crumb {
namespace {

class RadixTreeTest : public ::testing::Test {
 protected:
  void TearDown() override { EXPECT_EQ(absl::OkStatus(), tree_.CheckInvariants()); }

  PrefixPosition Extend(std::string_view letters) {
    return tree_.Extend(Pages(letters), ++stamp_).end;
  }
  uint32_t Match(std::string_view letters) { return tree_.Match(Pages(letters)).pages; }
  int64_t LastUse(std::string_view letters) {
    const PrefixPosition end = tree_.Match(Pages(letters));
    return end.node->LastUse(end.pages - 1);
  }

  RadixTree tree_;
  int64_t stamp_ = 0;
};

TEST_F(RadixTreeTest, EmptyTreeMatchesNothing) {
  EXPECT_EQ(0u, Match("abc"));
  EXPECT_TRUE(tree_.empty());
}

TEST_F(RadixTreeTest, MatchesAsFarAsTheTokensAgree) {
  Extend("abcd");
  EXPECT_EQ(4u, Match("abcd"));
  EXPECT_EQ(4u, Match("abcdef"));
  EXPECT_EQ(2u, Match("ab"));
  EXPECT_EQ(2u, Match("abxd"));
  EXPECT_EQ(0u, Match("xbcd"));
}

TEST_F(RadixTreeTest, OneOtherTokenEndsTheMatchAtItsPage) {
  Extend("abcd");
  for (const size_t wrong : {size_t{0}, size_t{63}, size_t{64}, size_t{150}, size_t{255}}) {
    std::vector<uint32_t> tokens = Pages("abcd");
    tokens[wrong] ^= 1u << 31;
    EXPECT_EQ(wrong / kPageTokens, tree_.Match(tokens).pages) << "token " << wrong;
  }
}

TEST_F(RadixTreeTest, PartOfAPageIsNoPage) {
  Extend("ab");
  std::vector<uint32_t> tokens = Pages("ab");
  tokens.pop_back();
  EXPECT_EQ(1u, tree_.Match(tokens).pages);
  tokens.resize(kPageTokens - 1);
  EXPECT_EQ(0u, tree_.Match(tokens).pages);
}

TEST_F(RadixTreeTest, RunThatNothingElseFollowsGrowsInPlace) {
  Extend("ab");
  Extend("abcd");
  EXPECT_EQ(1u, tree_.num_nodes());
  EXPECT_EQ(4u, tree_.num_pages());
}

TEST_F(RadixTreeTest, SplitMovesPagesWithTheirSlots) {
  PrefixNode* const node = Extend("abcd").node;
  for (uint32_t page = 0; page < 4; ++page) {
    node->pages()[page] = {.int2 = page + 1, .bf16 = page + 11};
  }
  const RadixTree::Extension extension = tree_.Extend(Pages("abxy"), ++stamp_);
  EXPECT_EQ(2u, extension.old_pages);
  ASSERT_NE(nullptr, extension.split_off);
  EXPECT_EQ(3u, tree_.num_nodes());
  EXPECT_EQ(6u, tree_.num_pages());
  EXPECT_EQ(2u, extension.split_off->pages()[1].int2);
  EXPECT_EQ(node, tree_.Match(Pages("abcd")).node);  // The lower part stays itself.
  EXPECT_EQ(2u, node->first_page());
  EXPECT_EQ(13u, node->pages()[0].bf16);
  EXPECT_EQ(0u, extension.end.node->pages()[0].int2);
  EXPECT_EQ(extension.split_off, RadixTree::NodeOf(extension.end, 1));
  EXPECT_EQ(2u, RadixTree::Path(extension.end).size());
}

TEST_F(RadixTreeTest, PinHoldsItsPageAndAllBeforeIt) {
  Extend("abcd");
  const PrefixPosition other = Extend("abxy");
  PrefixPin* const pin = tree_.Pin({other.node, 3});
  EXPECT_EQ(3u, tree_.held_pages());
  EXPECT_TRUE(other.node->IsHeld(2));
  EXPECT_FALSE(other.node->IsHeld(3));
  EXPECT_TRUE(other.node->parent()->IsHeld(1));
  EXPECT_FALSE(tree_.Match(Pages("abcd")).node->IsHeld(2));
  EXPECT_DEATH(tree_.RemoveLastPage(tree_.RemoveLastPage(other.node)), "held page");
  tree_.Unpin(pin);
  EXPECT_EQ(0u, tree_.held_pages());
}

TEST_F(RadixTreeTest, PinsStayOnTheirPagesThroughASplit) {
  const PrefixPosition end = Extend("abcd");
  PrefixPin* const early = tree_.Pin({end.node, 2});
  PrefixPin* const late = tree_.Pin(end);
  Extend("abcxy");
  EXPECT_EQ(absl::OkStatus(), tree_.CheckInvariants());
  EXPECT_EQ(3u, early->node->num_pages());
  EXPECT_EQ(end.node, late->node);
  EXPECT_EQ(4u, tree_.held_pages());
  tree_.Unpin(late);
  EXPECT_EQ(2u, tree_.held_pages());
  tree_.Unpin(early);
}

TEST_F(RadixTreeTest, HoldersOfOnePageShareAPin) {
  const PrefixPosition end = Extend("ab");
  PrefixPin* const pin = tree_.Pin(end);
  EXPECT_EQ(pin, tree_.Pin(end));
  EXPECT_EQ(3u, RadixTree::PinAgain(pin)->count);
  tree_.Unpin(pin);
  tree_.Unpin(pin);
  EXPECT_EQ(2u, tree_.held_pages());
  tree_.Unpin(pin);
  EXPECT_EQ(0u, tree_.held_pages());
}

TEST_F(RadixTreeTest, RemovesPagesFromTheEndAndThenTheNode) {
  Extend("ab");
  PrefixNode* const leaf = Extend("acd").node;
  PrefixNode* const parent = leaf->parent();
  EXPECT_EQ(leaf, tree_.RemoveLastPage(leaf));
  EXPECT_EQ(2u, Match("acd"));
  EXPECT_EQ(parent, tree_.RemoveLastPage(leaf));
  EXPECT_EQ(1u, Match("acd"));
  EXPECT_EQ(2u, Match("ab"));
  EXPECT_DEATH(tree_.RemoveLastPage(parent), "only leaves");
}

TEST_F(RadixTreeTest, UseOfAPrefixDoesNotWarmWhatFollowsIt) {
  Extend("abcd");
  RadixTree::Touch(tree_.Match(Pages("ab")), 50);
  EXPECT_EQ(50, LastUse("ab"));
  EXPECT_EQ(1, LastUse("abc"));
  EXPECT_EQ(1, LastUse("abcd"));
}

TEST_F(RadixTreeTest, RecencyStaysWithPagesThroughASplit) {
  Extend("abcdef");
  RadixTree::Touch(tree_.Match(Pages("abcd")), 50);
  tree_.Extend(Pages("abx"), 60);  // Splits within the warm part.
  EXPECT_EQ(60, LastUse("ab"));
  EXPECT_EQ(60, LastUse("abx"));
  EXPECT_EQ(50, LastUse("abcd"));
  EXPECT_EQ(1, LastUse("abcde"));
}

TEST_F(RadixTreeTest, HitsCountEachNodeOnTheWay) {
  Extend("ab");
  Extend("ac");
  RadixTree::TouchAsHit(tree_.Match(Pages("ab")), 10);
  RadixTree::TouchAsHit(tree_.Match(Pages("a")), 11);
  EXPECT_EQ(2u, tree_.Match(Pages("a")).node->hits());
  EXPECT_EQ(1u, tree_.Match(Pages("ab")).node->hits());
  EXPECT_EQ(0u, tree_.Match(Pages("ac")).node->hits());
}

}  // namespace
}  // namespace crumb
