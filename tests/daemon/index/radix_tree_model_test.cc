// SPDX-License-Identifier: Apache-2.0
//
// Random operations on a radix tree and on its naive twin, a set of prefixes. CRUMB_MODEL_SEED
// repeats a run.
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <iterator>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

#include "daemon/index/radix_tree.h"
#include "tests/daemon/index/letter_pages.h"

namespace crumb {
namespace {

uint64_t Seed() {
  uint64_t seed = 0;
  const char* text = std::getenv("CRUMB_MODEL_SEED");
  return text != nullptr && absl::SimpleAtoi(text, &seed) ? seed : std::random_device()();
}

// What a tree may do wrong, and so may its twin: that the model notices when the two differ is
// tested by twins that do.
enum class TwinFault {
  kNone,
  kFindsAPageTooFew,
  kFindsAPageTooMany,
  kForgetsTheLastPageOfAnExtension,
  kForgetsPins,
  kKeepsARemovedPage,
};

// Letters stand for pages. Fatal failures say what differed.
class RadixModel {
 public:
  explicit RadixModel(uint64_t seed, TwinFault fault = TwinFault::kNone)
      : random_(seed), fault_(fault) {}

  // One random operation, and what must hold after it.
  void Step() {
    std::string letters;
    for (uint64_t n = 1 + random_() % 8; n > 0; --n) {
      letters.push_back(static_cast<char>('a' + random_() % 2));
    }
    const size_t expected = Matched(letters);
    const PrefixPosition found = tree_.Match(Pages(letters));
    ASSERT_EQ(expected, found.pages) << letters;
    const uint64_t dice = random_() % 10;
    if (dice < 3) {
      Extend(letters, expected);
    } else if (dice < 5 && found.pages > 0 && pins_.size() < 10) {
      pins_.emplace(letters.substr(0, expected), tree_.Pin(found));
      RadixTree::Touch(found, ++stamp_);
    } else if (dice < 7 && !pins_.empty()) {
      Unpin();
    } else if (found.pages > 0 && found.node->is_leaf() && found.pages == found.node->end_page()) {
      RemoveLastPage(letters.substr(0, expected), found);
    }
    Check();
  }

 private:
  size_t Matched(const std::string& letters) const {
    size_t pages = 0;
    while (pages < letters.size() && prefixes_.contains(letters.substr(0, pages + 1))) {
      ++pages;
    }
    if (fault_ == TwinFault::kFindsAPageTooFew && pages > 0) {
      --pages;
    } else if (fault_ == TwinFault::kFindsAPageTooMany && pages < letters.size()) {
      ++pages;
    }
    return pages;
  }
  bool IsHeld(const std::string& prefix) const {
    const auto pin = pins_.lower_bound(prefix);
    return fault_ != TwinFault::kForgetsPins && pin != pins_.end() &&
           pin->first.starts_with(prefix);
  }

  void Extend(const std::string& letters, size_t old_pages) {
    ASSERT_EQ(old_pages, tree_.Extend(Pages(letters), ++stamp_).old_pages);
    const size_t forgotten = fault_ == TwinFault::kForgetsTheLastPageOfAnExtension ? 1 : 0;
    for (size_t n = 1; n <= letters.size() - forgotten; ++n) {
      prefixes_.insert(letters.substr(0, n));
    }
  }
  void Unpin() {
    const auto pin = std::next(pins_.begin(), static_cast<ptrdiff_t>(random_() % pins_.size()));
    ASSERT_EQ(pin->first.size(), pin->second->last_page + 1);
    tree_.Unpin(pin->second);
    pins_.erase(pin);
  }
  void RemoveLastPage(const std::string& prefix, const PrefixPosition& end) {
    ASSERT_EQ(IsHeld(prefix), end.node->IsHeld(end.pages - 1));
    if (!end.node->IsHeld(end.pages - 1)) {
      tree_.RemoveLastPage(end.node);
      if (fault_ != TwinFault::kKeepsARemovedPage) {
        prefixes_.erase(prefix);
      }
    }
  }
  void Check() const {
    ASSERT_EQ(prefixes_.size(), tree_.num_pages());
    ASSERT_EQ(std::count_if(prefixes_.begin(), prefixes_.end(),
                            [&](const std::string& prefix) { return IsHeld(prefix); }),
              static_cast<ptrdiff_t>(tree_.held_pages()));
    ASSERT_EQ(absl::OkStatus(), tree_.CheckInvariants());
  }

  std::mt19937_64 random_;
  const TwinFault fault_;
  RadixTree tree_;
  int64_t stamp_ = 0;
  std::set<std::string> prefixes_;  // All, each of whole pages.
  std::multimap<std::string, PrefixPin*> pins_;
};

TEST(RadixTreeModelTest, AgreesWithASetOfPrefixesUnderRandomOperations) {
  const uint64_t seed = Seed();
  std::cout << "CRUMB_MODEL_SEED=" << seed << "\n";
  RadixModel model(seed);
  for (int step = 0; step < 20'000 && !HasFatalFailure(); ++step) {
    SCOPED_TRACE(absl::StrCat("step ", step, " of seed ", seed));
    model.Step();
  }
}

TEST(RadixTreeModelTest, TwinsThatErrAreCaught) {
  const std::pair<TwinFault, const char*> faults[] = {
      {TwinFault::kFindsAPageTooFew, "a tree that finds a page too many"},
      {TwinFault::kFindsAPageTooMany, "a tree that finds a page too few"},
      {TwinFault::kForgetsTheLastPageOfAnExtension, "a tree that adds a page too many"},
      {TwinFault::kForgetsPins, "a tree that holds what is not pinned"},
      {TwinFault::kKeepsARemovedPage, "a tree that removes a page too many"},
  };
  const uint64_t seed = Seed();
  for (const auto& [fault, what] : faults) {
    RadixModel model(seed, fault);
    testing::TestPartResultArray found;
    int steps = 0;
    for (; found.size() == 0 && steps < 1000; ++steps) {
      const testing::ScopedFakeTestPartResultReporter catcher(
          testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &found);
      model.Step();
    }
    EXPECT_GT(found.size(), 0) << what << " is not noticed; CRUMB_MODEL_SEED=" << seed;
    std::cout << what << " is noticed after " << steps << " steps\n";
  }
}

}  // namespace
}  // namespace crumb
