// SPDX-License-Identifier: Apache-2.0
//
// Random operations against a naive twin: what is found, its bytes, what a publish lacks, who holds
// what. CRUMB_MODEL_SEED repeats a run, CRUMB_MODEL_OPERATIONS makes it longer.
#include "tests/model/store_model.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>
#include <random>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace crumb {
namespace {

uint64_t FromEnvironment(const char* name, uint64_t fallback) {
  uint64_t value = 0;
  const char* text = std::getenv(name);
  return text != nullptr && absl::SimpleAtoi(text, &value) ? value : fallback;
}

void RunModel(size_t capacity_bytes, StoreCounters* counters) {
  const uint64_t seed = FromEnvironment("CRUMB_MODEL_SEED", std::random_device()());
  const uint64_t operations = FromEnvironment("CRUMB_MODEL_OPERATIONS", 100'000);
  std::cout << "CRUMB_MODEL_SEED=" << seed << " CRUMB_MODEL_OPERATIONS=" << operations << "\n";
  StoreModel model(seed, capacity_bytes);
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
}

TEST(StoreModelTest, AmpleStoreAgreesWithTwinInEverything) {
  StoreCounters counters;
  RunModel(size_t{1} << 30, &counters);
  EXPECT_EQ(0u, counters.evicted_tail_copies);
}

TEST(StoreModelTest, FullStoreEvictsOnlyWhatNobodyHolds) {
  StoreCounters counters;
  RunModel(size_t{1} << 20, &counters);
  EXPECT_GT(counters.evicted_pages, 0u);
  EXPECT_GT(counters.evicted_tail_copies, 0u);
}

}  // namespace
}  // namespace crumb
