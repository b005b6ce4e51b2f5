// SPDX-License-Identifier: Apache-2.0
//
// The tables of a step as the device has them after the copies that Finish asks for, against what
// kernels must find there.
#include "client/gpu/step_tables.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <span>
#include <vector>

#include "gtest/gtest.h"

#include "proto/page/page_format.h"

namespace crumb {
namespace {

constexpr StepTables::Shape kShape{
    .max_rows = 5, .max_tokens = 300, .history_stride = 40, .window_stride = 9};

// The naive twin: everything a sequence has, and no memory of what was copied.
struct Twin {
  uint64_t id = 0;
  uint32_t length = 0;
  std::vector<const std::byte*> adopted;  // The same pages as `history`, and the first of them.
  std::vector<const std::byte*> history;
  std::vector<const std::byte*> windows;

  std::span<const std::byte* const> own() const {
    return std::span(history).subspan(adopted.size());
  }
};

class StepTablesTest : public testing::Test {
 protected:
  template <typename T>
  const T* Device(size_t offset) const {
    return reinterpret_cast<const T*>(device_.data() + offset);
  }
  size_t Copy() {
    size_t bytes = 0;
    for (const StepTables::Range& range : tables_.Finish()) {
      std::copy_n(host_.begin() + static_cast<ptrdiff_t>(range.offset), range.bytes,
                  device_.begin() + static_cast<ptrdiff_t>(range.offset));
      bytes += range.bytes;
    }
    return bytes;
  }
  // A sequence of `length` tokens of which `history_pages` are in history.
  Twin NewTwin(uint32_t length, uint32_t history_pages, uint32_t adopted_pages = 0) {
    Twin twin;
    twin.id = ++last_id_;
    twin.length = length;
    for (uint32_t i = 0; i < history_pages; ++i) {
      twin.history.push_back(NextPage());
    }
    twin.adopted.assign(twin.history.begin(), twin.history.begin() + adopted_pages);
    return twin;
  }
  const std::byte* NextPage() { return &pages_[next_page_++ % pages_.size()]; }
  static uint32_t NumPages(uint32_t tokens) { return (tokens + kPageTokens - 1) / kPageTokens; }

  void Add(Twin* twin, uint32_t num_tokens) {
    const uint32_t num_pages = NumPages(twin->length + num_tokens);
    twin->windows.resize(num_pages - twin->history.size());
    std::generate(twin->windows.begin(), twin->windows.end(), [&] { return NextPage(); });
    tables_.Add({.sequence_id = twin->id,
                 .length = twin->length,
                 .num_tokens = num_tokens,
                 .num_pages = num_pages,
                 .adopted_history = twin->adopted,
                 .own_history = twin->own(),
                 .windows = twin->windows});
  }
  void ExpectRow(uint32_t row, const Twin& twin, uint32_t num_tokens, uint32_t first_token) const {
    const auto history_tokens = static_cast<uint32_t>(twin.history.size()) * kPageTokens;
    EXPECT_EQ(Device<uint32_t>(tables_.history_pages_offset())[row], twin.history.size());
    EXPECT_EQ(Device<uint32_t>(StepTables::window_tokens_offset())[row],
              twin.length + num_tokens - history_tokens);
    const auto* history = Device<const std::byte*>(tables_.history_offset(row));
    EXPECT_TRUE(std::equal(twin.own().begin(), twin.own().end(), history)) << "row " << row;
    EXPECT_TRUE(
        std::is_permutation(twin.adopted.begin(), twin.adopted.end(), history + twin.own().size()))
        << "row " << row;
    EXPECT_EQ(Device<uint32_t>(tables_.own_pages_offset())[row], twin.history.size());
    const auto* windows = Device<const std::byte*>(tables_.windows_offset(row));
    EXPECT_TRUE(std::equal(twin.windows.begin(), twin.windows.end(), windows)) << "row " << row;
    for (uint32_t i = 0; i < num_tokens; ++i) {
      EXPECT_EQ(Device<uint32_t>(tables_.slots_offset())[first_token + i],
                twin.length + i - history_tokens);
      EXPECT_EQ(Device<uint32_t>(tables_.token_rows_offset())[first_token + i], row);
    }
  }

  std::vector<std::byte> host_ = std::vector<std::byte>(StepTables::Bytes(kShape));
  std::vector<std::byte> device_ =
      std::vector<std::byte>(StepTables::Bytes(kShape), std::byte{0xee});
  StepTables tables_{kShape, host_.data()};
  std::vector<std::byte> pages_ = std::vector<std::byte>(100'000);
  size_t next_page_ = 0;
  uint64_t last_id_ = 0;
};

TEST_F(StepTablesTest, RowThatKeepsItsSequenceHasOnlyNewHistoryCopied) {
  Twin twin = NewTwin(64 * 20 + 5, 16);
  const size_t fixed = tables_.windows_offset(1);
  const auto step = [&] {
    tables_.Begin();
    Add(&twin, 1);
    return Copy();
  };
  EXPECT_EQ(step(), fixed + 16 * sizeof(void*));
  EXPECT_EQ(step(), fixed);
  twin.history.push_back(NextPage());
  EXPECT_EQ(step(), fixed + sizeof(void*));
  ExpectRow(0, twin, 1, 0);
  tables_.Forget();
  EXPECT_EQ(step(), fixed + 17 * sizeof(void*));
  ExpectRow(0, twin, 1, 0);
}

TEST_F(StepTablesTest, RowsWithoutASequenceArePadding) {
  Twin twin = NewTwin(100, 0);
  tables_.Begin();
  Add(&twin, 1);
  Copy();
  for (uint32_t row = 1; row < kShape.max_rows; ++row) {
    EXPECT_EQ(Device<uint32_t>(tables_.history_pages_offset())[row], 0u);
    EXPECT_EQ(Device<uint32_t>(StepTables::window_tokens_offset())[row], 0u);
    EXPECT_EQ(Device<uint32_t>(tables_.slots_offset())[row], AppendRowsParams::kNoSlot);
  }
}

TEST_F(StepTablesTest, OwnPageTakesThePlaceOfAnAdoptedOneThatGoesToTheEnd) {
  Twin twin = NewTwin(64 * 20 + 5, 16, 10);
  const size_t fixed = tables_.windows_offset(1);
  const auto step = [&] {
    tables_.Begin();
    Add(&twin, 1);
    const size_t bytes = Copy() - fixed;
    ExpectRow(0, twin, 1, 0);
    return bytes / sizeof(void*);
  };
  EXPECT_EQ(step(), 16u);
  EXPECT_EQ(step(), 0u);
  twin.history.push_back(NextPage());
  EXPECT_EQ(step(), 2u);
  for (int i = 0; i < 12; ++i) {  // More than were adopted, at once.
    twin.length += kPageTokens;
    twin.history.push_back(NextPage());
  }
  EXPECT_EQ(step(), 12u + 10u);
}

TEST_F(StepTablesTest, RowsOfOnePrefixSayHowManyPagesAreTheirOwn) {
  Twin twin = NewTwin(64 * 20 + 5, 16, 10);
  const std::vector<const std::byte*> other(10, NextPage());
  const size_t fixed = tables_.windows_offset(1);
  const auto step = [&](std::span<const std::byte* const> prefix, uint32_t own_pages) {
    tables_.Begin(prefix);
    Add(&twin, 1);
    const size_t bytes = Copy() - fixed;
    EXPECT_EQ(*Device<uint32_t>(tables_.prefix_pages_offset()), prefix.size());
    EXPECT_TRUE(std::equal(prefix.begin(), prefix.end(),
                           Device<const std::byte*>(tables_.prefix_offset())));
    EXPECT_EQ(Device<uint32_t>(tables_.own_pages_offset())[0], own_pages);
    EXPECT_EQ(Device<uint32_t>(tables_.history_pages_offset())[0], 16u);
    return bytes / sizeof(void*);
  };
  EXPECT_EQ(step({}, 16), 16u);
  EXPECT_EQ(step(twin.adopted, 6), 10u) << "the prefix alone; the row is there";
  EXPECT_EQ(step(twin.adopted, 6), 0u);
  EXPECT_EQ(step({}, 16), 0u);
  EXPECT_EQ(step(other, 6), 10u);
  tables_.Forget();
  EXPECT_EQ(step(other, 6), 10u + 16u);
}

TEST_F(StepTablesTest, AnyStepsOfAnyMembersGiveWhatTheTwinHas) {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::map<uint64_t, Twin> twins;
    for (int step = 0; step < 100; ++step) {
      while (twins.size() < 7) {
        const auto pages = static_cast<uint32_t>(random() % 20);
        const Twin twin = NewTwin(pages * kPageTokens + static_cast<uint32_t>(random() % 200),
                                  pages, static_cast<uint32_t>(random() % (pages + 1)));
        twins[twin.id] = twin;
      }
      std::vector<uint64_t> members;
      for (const auto& [id, twin] : twins) {
        members.push_back(id);
      }
      if (random() % 2 == 0) {  // Else most rows keep their sequences.
        std::shuffle(members.begin(), members.end(), random);
      }
      members.resize(1 + random() % kShape.max_rows);
      tables_.Begin();
      std::vector<uint32_t> counts;
      for (const uint64_t id : members) {
        counts.push_back(random() % 3 == 0 ? 1 + static_cast<uint32_t>(random() % 60) : 1);
        Add(&twins[id], counts.back());
      }
      Copy();
      uint32_t first_token = 0;
      for (uint32_t row = 0; row < members.size(); ++row) {
        ExpectRow(row, twins[members[row]], counts[row], first_token);
        first_token += counts[row];
        Twin& twin = twins[members[row]];
        twin.length += counts[row];
        while (twin.history.size() * kPageTokens + 200 < twin.length) {
          twin.history.push_back(NextPage());
        }
        if (twin.history.size() > 35 || random() % 30 == 0) {
          twins.erase(twin.id);
        }
      }
      ASSERT_EQ(tables_.num_tokens(), first_token);
    }
  }
}

}  // namespace
}  // namespace crumb
