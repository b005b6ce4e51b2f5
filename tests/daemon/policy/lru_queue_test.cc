// SPDX-License-Identifier: Apache-2.0
#include "daemon/policy/lru_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>

namespace crumb {
namespace {

using ::testing::ElementsAre;
using ::testing::Pair;

TEST(LruQueueTest, OrdersByLastUseThenItem) {
  LruQueue<int> queue;
  queue.Offer(3, 20);
  queue.Offer(1, 30);
  queue.Offer(2, 20);
  EXPECT_THAT(queue.ordered(), ElementsAre(Pair(20, 2), Pair(20, 3), Pair(30, 1)));
}

TEST(LruQueueTest, OfferMovesAnItemThatIsIn) {
  LruQueue<int> queue;
  queue.Offer(1, 10);
  queue.Offer(2, 20);
  queue.Offer(1, 30);
  EXPECT_THAT(queue.ordered(), ElementsAre(Pair(20, 2), Pair(30, 1)));
  queue.Offer(1, 5);
  EXPECT_THAT(queue.ordered(), ElementsAre(Pair(5, 1), Pair(20, 2)));
}

TEST(LruQueueTest, WithdrawnItemIsGoneAndMayComeBack) {
  LruQueue<int> queue;
  queue.Offer(1, 10);
  queue.Withdraw(1);
  queue.Withdraw(7);  // Never was in.
  EXPECT_FALSE(queue.Contains(1));
  EXPECT_EQ(0u, queue.size());
  queue.Offer(1, 3);
  EXPECT_THAT(queue.ordered(), ElementsAre(Pair(3, 1)));
}

}  // namespace
}  // namespace crumb
