// SPDX-License-Identifier: Apache-2.0
//
// The thread sanitizer believes Abseil's synchronization, and still finds what lacks any. Any
// report ends the program, so that a case passes by its end.
#include <cstdlib>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace crumb {
namespace {

constexpr int kRounds = 2000;

void InThreads(int num_threads, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  threads.reserve(static_cast<size_t>(num_threads));
  for (int thread = 0; thread < num_threads; ++thread) {
    threads.emplace_back(body, thread);
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

struct Guarded {
  absl::Mutex mutex;
  absl::CondVar changed;
  int value = 0;
};

TEST(TsanAbseilTest, AMutexOrdersWriters) {
  Guarded guarded;
  InThreads(4, [&](int) {
    for (int round = 0; round < kRounds; ++round) {
      const absl::MutexLock lock(&guarded.mutex);
      ++guarded.value;
    }
  });
  EXPECT_EQ(guarded.value, 4 * kRounds);
}

TEST(TsanAbseilTest, ReadersAreOrderedAgainstAWriter) {
  Guarded guarded;
  InThreads(3, [&](int thread) {
    for (int round = 0; round < kRounds; ++round) {
      if (thread == 0) {
        const absl::WriterMutexLock lock(&guarded.mutex);
        ++guarded.value;
      } else {
        const absl::ReaderMutexLock lock(&guarded.mutex);
        ASSERT_LE(guarded.value, kRounds);
      }
    }
  });
}

// The unlocking thread evaluates the condition for the one that waits.
TEST(TsanAbseilTest, ConditionsAreReadUnderTheMutex) {
  Guarded guarded;
  InThreads(2, [&](int thread) {
    for (int round = 0; round < kRounds; ++round) {
      const auto my_turn = [&] { return guarded.value % 2 == thread; };
      const absl::MutexLock lock(&guarded.mutex);
      guarded.mutex.Await(absl::Condition(&my_turn));
      ++guarded.value;
    }
  });
  EXPECT_EQ(guarded.value, 2 * kRounds);
}

TEST(TsanAbseilTest, AConditionVariableGivesUpAndTakesTheMutex) {
  Guarded guarded;
  InThreads(2, [&](int thread) {
    for (int round = 0; round < kRounds; ++round) {
      const absl::MutexLock lock(&guarded.mutex);
      while (guarded.value % 2 != thread) {
        guarded.changed.Wait(&guarded.mutex);
      }
      ++guarded.value;
      guarded.changed.SignalAll();
    }
  });
  EXPECT_EQ(guarded.value, 2 * kRounds);
}

TEST(TsanAbseilTest, AFailedTryOrdersNothingAndHoldsNothing) {
  Guarded guarded;
  InThreads(3, [&](int) {
    for (int round = 0; round < kRounds; ++round) {
      if (guarded.mutex.TryLock()) {
        ++guarded.value;
        guarded.mutex.Unlock();
      }
    }
  });
  EXPECT_GE(guarded.value, 1);
}

TEST(TsanAbseilTest, WhatStandsBeforeANotificationIsSeenBehindIt) {
  for (int round = 0; round < kRounds / 10; ++round) {
    absl::Notification done;
    int value = 0;
    std::thread writer([&] {
      value = round;
      done.Notify();
    });
    done.WaitForNotification();
    EXPECT_EQ(value, round);
    writer.join();
  }
}

TEST(TsanAbseilTest, AStatusIsDeletedBehindItsLastReader) {
  for (int round = 0; round < kRounds / 10; ++round) {
    auto status = std::make_unique<absl::Status>(absl::InternalError("shared by two threads"));
    std::thread reader([copy = *status] { EXPECT_EQ(copy.message().size(), 21U); });
    EXPECT_EQ(status->message().size(), 21U);
    status.reset();
    reader.join();
  }
}

// What would make every other pass worthless: a sanitizer that sees nothing.
TEST(TsanAbseilDeathTest, AMissingMutexIsStillReported) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  const auto race = [] {
    Guarded guarded;
    InThreads(2, [&](int thread) {
      for (int round = 0; round < kRounds; ++round) {
        if (thread == 0) {
          const absl::MutexLock lock(&guarded.mutex);
          ++guarded.value;
        } else {
          ++guarded.value;
        }
      }
    });
    std::_Exit(0);
  };
  EXPECT_EXIT(race(), testing::ExitedWithCode(66), "data race");
}

}  // namespace
}  // namespace crumb
