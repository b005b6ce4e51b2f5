// SPDX-License-Identifier: Apache-2.0
#include "daemon/demote/demote_pool.h"

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace crumb {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

// What the jobs of one test did, in order. Thread-safe.
class Journal {
 public:
  void Write(std::string line) {
    absl::MutexLock lock(&mutex_);
    lines_.push_back(std::move(line));
  }
  std::vector<std::string> lines() const {
    absl::MutexLock lock(&mutex_);
    return lines_;
  }
  void WaitForLines(size_t count) const {
    absl::MutexLock lock(&mutex_);
    const auto has_them = [this, count]() { return lines_.size() >= count; };
    mutex_.Await(absl::Condition(&has_them));
  }

 private:
  mutable absl::Mutex mutex_;
  std::vector<std::string> lines_;
};

// Writes "a0" when its page 0 runs and "a: OK" when it ends.
class JournalJob : public DemoteJob {
 public:
  using RunFunction = std::function<absl::Status(size_t)>;

  JournalJob(
      Journal& journal, std::string name, size_t num_pages, RunFunction run, uint64_t group = 0)
      : journal_(journal),
        name_(std::move(name)),
        num_pages_(num_pages),
        run_(std::move(run)),
        group_(group) {}

  uint64_t group() const override { return group_; }
  size_t num_pages() const override { return num_pages_; }
  absl::Status RunPage(size_t index, DemoteScratch& /*scratch*/) override {
    journal_.Write(name_ + std::to_string(index));
    return run_(index);
  }
  void Finish(absl::Status status) override {
    journal_.Write(name_ + ": " + absl::StatusCodeToString(status.code()));
  }

 private:
  Journal& journal_;
  const std::string name_;
  const size_t num_pages_;
  const RunFunction run_;
  const uint64_t group_;
};

class DemotePoolTest : public testing::Test {
 protected:
  std::unique_ptr<DemoteJob> Job(
      const std::string& name, size_t num_pages, JournalJob::RunFunction run = [](size_t) {
        return absl::OkStatus();
      }) {
    return std::make_unique<JournalJob>(journal_, name, num_pages, std::move(run));
  }
  // Its page 0 runs until gate_ opens.
  std::unique_ptr<DemoteJob> GatedJob(const std::string& name, size_t num_pages) {
    return Job(name, num_pages, [this](size_t page) {
      if (page == 0) {
        gate_.WaitForNotification();
      }
      return absl::OkStatus();
    });
  }
  // Until every job that was taken has ended.
  static void WaitUntilIdle(const DemotePool& pool) {
    while (pool.num_jobs() != 0) {
      std::this_thread::yield();
    }
  }

  Journal journal_;
  absl::Notification gate_;
};

TEST_F(DemotePoolTest, RunsEachPageOnceAndThenEnds) {
  DemotePool pool({.num_threads = 1, .max_jobs = 1});
  ASSERT_TRUE(pool.Submit(Job("a", 3)).ok());
  journal_.WaitForLines(4);
  EXPECT_THAT(journal_.lines(), ElementsAre("a0", "a1", "a2", "a: OK"));
  WaitUntilIdle(pool);
}

TEST_F(DemotePoolTest, PublishesTakeTurnsPageByPage) {
  DemotePool pool({.num_threads = 1, .max_jobs = 3});
  ASSERT_TRUE(pool.Submit(GatedJob("a", 4)).ok());
  journal_.WaitForLines(1);
  ASSERT_TRUE(pool.Submit(Job("b", 1)).ok());
  ASSERT_TRUE(pool.Submit(Job("c", 2)).ok());
  gate_.Notify();
  journal_.WaitForLines(10);
  EXPECT_THAT(journal_.lines(),
              ElementsAre("a0", "a1", "b0", "b: OK", "c0", "a2", "c1", "c: OK", "a3", "a: OK"));
}

TEST_F(DemotePoolTest, PartsOfOnePublishShareItsTurnAndRunInTheirOrder) {
  DemotePool pool({.num_threads = 1, .max_jobs = 5});
  ASSERT_TRUE(pool.Submit(GatedJob("gate", 1)).ok());
  journal_.WaitForLines(1);
  const auto part = [&](const std::string& name, size_t num_pages, uint64_t group) {
    return std::make_unique<JournalJob>(
        journal_, name, num_pages, [](size_t) { return absl::OkStatus(); }, group);
  };
  ASSERT_TRUE(pool.Submit(part("a", 2, 7)).ok());
  ASSERT_TRUE(pool.Submit(part("b", 2, 7)).ok());
  ASSERT_TRUE(pool.Submit(part("x", 3, 8)).ok());
  ASSERT_TRUE(pool.Submit(Job("alone", 1)).ok());
  gate_.Notify();
  WaitUntilIdle(pool);
  EXPECT_THAT(journal_.lines(),
              ElementsAre("gate0", "gate: OK", "a0", "x0", "alone0", "alone: OK", "a1", "a: OK",
                          "x1", "b0", "x2", "x: OK", "b1", "b: OK"));
}

TEST_F(DemotePoolTest, PartThatFailsLeavesTheOthersOfItsPublishInTheirOrder) {
  DemotePool pool({.num_threads = 1, .max_jobs = 4});
  ASSERT_TRUE(pool.Submit(GatedJob("gate", 1)).ok());
  journal_.WaitForLines(1);
  for (const std::string name : {"a", "b", "c"}) {
    ASSERT_TRUE(pool.Submit(std::make_unique<JournalJob>(
                                journal_, name, 2,
                                [name](size_t) {
                                  return name == "b" ? absl::DataLossError("") : absl::OkStatus();
                                },
                                /*group=*/7))
                    .ok());
  }
  gate_.Notify();
  WaitUntilIdle(pool);
  EXPECT_THAT(journal_.lines(), ElementsAre("gate0", "gate: OK", "a0", "a1", "a: OK", "b0",
                                            "b: DATA_LOSS", "c0", "c1", "c: OK"));
}

TEST_F(DemotePoolTest, OnePublishUsesAllThreads) {
  DemotePool pool({.num_threads = 2, .max_jobs = 1});
  // Neither page ends before the other has begun.
  absl::Mutex mutex;
  int begun = 0;
  const auto both_have_begun = [&begun] { return begun == 2; };
  ASSERT_TRUE(pool.Submit(Job("a", 2,
                              [&](size_t) {
                                absl::MutexLock lock(&mutex);
                                ++begun;
                                mutex.Await(absl::Condition(&both_have_begun));
                                return absl::OkStatus();
                              }))
                  .ok());
  journal_.WaitForLines(3);
  EXPECT_EQ(journal_.lines().back(), "a: OK");
}

TEST_F(DemotePoolTest, OneJobTooManyIsRefusedWithTheNumbersAndNeverRun) {
  DemotePool pool({.num_threads = 1, .max_jobs = 2});
  ASSERT_TRUE(pool.Submit(GatedJob("a", 1)).ok());
  ASSERT_TRUE(pool.Submit(Job("b", 1)).ok());
  const absl::Status refused = pool.Submit(Job("c", 1));
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(
      std::string(refused.message()),
      AllOf(HasSubstr("2 publishes"), HasSubstr("[demote] queue is 2"), HasSubstr("threads: 1")));
  EXPECT_EQ(pool.num_jobs(), 2u);
  gate_.Notify();
  WaitUntilIdle(pool);
  ASSERT_TRUE(pool.Submit(Job("d", 1)).ok()) << "there is room again";
  WaitUntilIdle(pool);
  EXPECT_THAT(journal_.lines(), ElementsAre("a0", "a: OK", "b0", "b: OK", "d0", "d: OK"));
}

TEST_F(DemotePoolTest, FailedPageEndsItsPublishAtOnceAndNoOther) {
  DemotePool pool({.num_threads = 1, .max_jobs = 2});
  ASSERT_TRUE(pool.Submit(Job("a", 3,
                              [this](size_t page) {
                                if (page == 0) {
                                  gate_.WaitForNotification();
                                  return absl::OkStatus();
                                }
                                return absl::DataLossError("of page 1");
                              }))
                  .ok());
  journal_.WaitForLines(1);
  ASSERT_TRUE(pool.Submit(Job("b", 2)).ok());
  gate_.Notify();
  WaitUntilIdle(pool);
  EXPECT_THAT(journal_.lines(), ElementsAre("a0", "a1", "a: DATA_LOSS", "b0", "b1", "b: OK"));
}

TEST_F(DemotePoolTest, FailedPublishEndsOnceWhenItsRunningPagesHave) {
  DemotePool pool({.num_threads = 2, .max_jobs = 1});
  absl::Notification failed;
  ASSERT_TRUE(pool.Submit(Job("a", 5,
                              [&](size_t page) {
                                if (page == 0) {
                                  gate_.WaitForNotification();  // Runs while page 1 fails.
                                  return absl::InternalError("second");
                                }
                                failed.Notify();
                                return absl::DataLossError("first");
                              }))
                  .ok());
  failed.WaitForNotification();
  EXPECT_EQ(pool.num_jobs(), 1u) << "page 0 still runs";
  gate_.Notify();
  WaitUntilIdle(pool);
  const std::vector<std::string> lines = journal_.lines();
  ASSERT_EQ(lines.size(), 3u) << "two pages ran, and one end";
  EXPECT_THAT(lines.back(), testing::AnyOf("a: DATA_LOSS", "a: INTERNAL"));
}

TEST_F(DemotePoolTest, StopWaitsForRunningPagesAndEndsTheRestWithUnavailable) {
  DemotePool pool({.num_threads = 1, .max_jobs = 8});
  ASSERT_TRUE(pool.Submit(GatedJob("a", 1)).ok());
  journal_.WaitForLines(1);
  ASSERT_TRUE(pool.Submit(Job("b", 2)).ok());
  std::thread stopper([&pool] { pool.Stop(); });
  // Whatever is still taken here, until Stop has begun, ends as b does.
  while (!absl::IsUnavailable(pool.Submit(Job("c", 1)))) {
    std::this_thread::yield();
  }
  gate_.Notify();
  stopper.join();
  std::vector<std::string> lines = journal_.lines();
  ASSERT_GE(lines.size(), 3u);
  EXPECT_EQ(lines[1], "a: OK") << "its only page was running";
  EXPECT_EQ(lines[2], "b: UNAVAILABLE");
  EXPECT_THAT(std::vector(lines.begin() + 3, lines.end()), testing::Each("c: UNAVAILABLE"));
  EXPECT_EQ(pool.num_jobs(), 0u);
  pool.Stop();  // Again: nothing.
  EXPECT_TRUE(absl::IsUnavailable(pool.Submit(Job("d", 1))));
}

TEST_F(DemotePoolTest, StopEndsAPublishBetweenTwoOfItsPages) {
  DemotePool pool({.num_threads = 1, .max_jobs = 1});
  ASSERT_TRUE(pool.Submit(GatedJob("a", 2)).ok());
  journal_.WaitForLines(1);
  std::thread stopper([&pool] { pool.Stop(); });
  while (!absl::IsUnavailable(pool.Submit(Job("b", 1)))) {
    std::this_thread::yield();
  }
  gate_.Notify();
  stopper.join();
  EXPECT_THAT(journal_.lines(), ElementsAre("a0", "a: UNAVAILABLE"));
  EXPECT_EQ(pool.num_jobs(), 0u);
}

}  // namespace
}  // namespace crumb
