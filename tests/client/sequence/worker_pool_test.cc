// SPDX-License-Identifier: Apache-2.0
#include "client/sequence/worker_pool.h"

#include <atomic>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace crumb {
namespace {

constexpr size_t kLarge = WorkerPool::kMinParallelWork;

TEST(WorkerPoolTest, RunsEachItemOnceAndReusesItsThreads) {
  WorkerPool pool(4);
  for (size_t loop = 0; loop < 200; ++loop) {
    std::vector<std::atomic<int>> runs(loop);
    ASSERT_TRUE(pool.ParallelFor(runs.size(), kLarge,
                                 [&](size_t item, uint32_t worker) {
                                   EXPECT_LT(worker, pool.num_threads());
                                   ++runs[item];
                                   return absl::OkStatus();
                                 })
                    .ok());
    for (const auto& count : runs) {
      EXPECT_EQ(count, 1);
    }
  }
}

TEST(WorkerPoolTest, ReportsTheLowestFailedItemWhateverTheTiming) {
  WorkerPool pool(3);
  for (int loop = 0; loop < 50; ++loop) {
    const absl::Status status =
        pool.ParallelFor(64, kLarge, [](size_t item, uint32_t) -> absl::Status {
          return item >= 5 ? absl::InternalError(absl::StrCat("item ", item)) : absl::OkStatus();
        });
    EXPECT_EQ(status.message(), "item 5");
  }
}

TEST(WorkerPoolTest, SmallWorkStaysOnTheCaller) {
  WorkerPool pool(4);
  EXPECT_TRUE(pool.ParallelFor(64, kLarge - 1,
                               [](size_t, uint32_t worker) {
                                 EXPECT_EQ(worker, 0u);
                                 return absl::OkStatus();
                               })
                  .ok());
}

TEST(WorkerPoolTest, OneThreadRunsItemsInOrder) {
  WorkerPool pool(1);
  std::vector<size_t> order;
  EXPECT_TRUE(pool.ParallelFor(5, kLarge,
                               [&](size_t item, uint32_t) {
                                 order.push_back(item);
                                 return absl::OkStatus();
                               })
                  .ok());
  EXPECT_EQ(order, (std::vector<size_t>{0, 1, 2, 3, 4}));
}

}  // namespace
}  // namespace crumb
