// SPDX-License-Identifier: Apache-2.0
//
// Random operations against a naive twin: what is found, its bytes, what a publish lacks, who holds
// what. CRUMB_MODEL_SEED repeats a run, CRUMB_MODEL_OPERATIONS makes it longer.
#include "tests/model/store_model.h"

#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>
#include <random>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace crumb {
namespace {

uint64_t FromEnvironment(const char* name, uint64_t fallback) {
  uint64_t value = 0;
  const char* text = std::getenv(name);
  return text != nullptr && absl::SimpleAtoi(text, &value) ? value : fallback;
}

void RunModel(size_t capacity_bytes, uint32_t num_segments, StoreCounters* counters) {
  const uint64_t seed = FromEnvironment("CRUMB_MODEL_SEED", std::random_device()());
  const uint64_t operations =
      FromEnvironment("CRUMB_MODEL_OPERATIONS", num_segments == 0 ? 100'000 : 30'000);
  std::cout << "CRUMB_MODEL_SEED=" << seed << " CRUMB_MODEL_OPERATIONS=" << operations << "\n";
  StoreModel model(seed, capacity_bytes, TwinFault::kNone, num_segments);
  for (uint64_t i = 0; i < operations; ++i) {
    SCOPED_TRACE(absl::StrCat("operation ", i, " of seed ", seed));
    model.Step();
    if (i % 5'000 == 4'999) {
      model.EndAll();
    }
    model.Check();
    if (::testing::Test::HasFatalFailure()) {
      return;
    }
  }
  *counters = model.counters();
  std::cout << counters->lookups << " lookups, " << counters->publishes_committed
            << " publishes committed, " << counters->publishes_refused << " refused, "
            << counters->publishes_aborted << " aborted, " << counters->expired_leases
            << " leases expired, " << counters->evicted_pages << " pages and "
            << counters->evicted_tail_copies << " tail copies evicted\n";
  if (num_segments > 0) {
    std::cout << counters->copies << " copies made, " << counters->failed_copies << " failed, "
              << counters->unplaced_copies << " without a place, " << counters->dropped_copies
              << " dropped, " << model.verified_copies() << " verified\n";
    EXPECT_GT(counters->copies, 0u);
    EXPECT_GT(counters->failed_copies, 0u);
    EXPECT_GT(model.verified_copies(), 0u);
  }
}

// The model must notice a store that differs from its twin; a twin that errs differs from a store
// that does not. Some tens to a thousand random operations find each of these faults.
TEST(StoreModelTest, TwinsThatErrAreCaught) {
  const std::pair<TwinFault, const char*> faults[] = {
      {TwinFault::kFindsAPageTooFew, "a store that finds a page too many"},
      {TwinFault::kFindsAPageTooMany, "a store that finds a page too few"},
      {TwinFault::kNeedsNoRecentWindow, "a store that gives up too much of a match"},
      {TwinFault::kShowsBeforeCommit, "a store that shows a page too late"},
      {TwinFault::kCommitsOneHead, "a store that shows heads that were not written"},
      {TwinFault::kForgetsPins, "a store that keeps what it should evict"},
      {TwinFault::kKeepsAnEvictedPage, "a store that evicts a page more than it says"},
      {TwinFault::kKeepsAbortedClaims, "a store that forgets who writes a page"},
  };
  const uint64_t seed = FromEnvironment("CRUMB_MODEL_SEED", std::random_device()());
  for (const auto& [fault, what] : faults) {
    StoreModel model(seed, size_t{1} << 30, fault);
    testing::TestPartResultArray found;
    uint64_t operations = 0;
    while (found.size() == 0 && operations < 20'000) {
      const testing::ScopedFakeTestPartResultReporter catcher(
          testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &found);
      model.Step();
      model.Check();
      ++operations;
    }
    EXPECT_GT(found.size(), 0) << what << " is not noticed; CRUMB_MODEL_SEED=" << seed;
    std::cout << what << " is noticed after " << operations << " operations\n";
  }
}

TEST(StoreModelTest, AmpleStoreAgreesWithTwinInEverything) {
  StoreCounters counters;
  RunModel(size_t{1} << 30, 0, &counters);
  EXPECT_EQ(0u, counters.evicted_tail_copies);
}

TEST(StoreModelTest, FullStoreEvictsOnlyWhatNobodyHolds) {
  StoreCounters counters;
  RunModel(size_t{1} << 20, 0, &counters);
  EXPECT_GT(counters.evicted_pages, 0u);
  EXPECT_GT(counters.evicted_tail_copies, 0u);
}

TEST(StoreModelTest, CopiesInATierBesideAreTheirPages) {
  StoreCounters counters;
  RunModel(size_t{1} << 30, 12, &counters);
}

TEST(StoreModelTest, FullStoreBesideAFullTierKeepsWhatLeasesHaveInBoth) {
  StoreCounters counters;
  RunModel(size_t{1} << 20, 5, &counters);
  EXPECT_GT(counters.evicted_pages, 0u);
  EXPECT_GT(counters.dropped_copies, 0u);
}

}  // namespace
}  // namespace crumb
