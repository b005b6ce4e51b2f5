// SPDX-License-Identifier: Apache-2.0
//
// The page table of a GPU's sequence beside the one of the CPU's, which is the model: the same
// pages in the same regions and encodings, whatever was done.
#include "client/gpu/gpu_page_table.h"

#include <algorithm>
#include <memory>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "client/sequence/page_table.h"
#include "tests/client/sequence/sequence_testing.h"
#include "tests/support/test_profile.h"

namespace crumb {
namespace {

using testing::HasSubstr;

constexpr PageEncoding kEncodings[] = {PageEncoding::kInt2, PageEncoding::kBf16};

// Numbered addresses; a limited number of them at a time.
class FakeSource : public GpuPageSource {
 public:
  absl::Status Take(PageEncoding encoding, std::span<std::byte*> pages) override {
    if (pages.size() > available(encoding)) {
      return absl::ResourceExhaustedError("no more pages");
    }
    for (std::byte*& page : pages) {
      page = &memory_[next_++ % memory_.size()];
      EXPECT_TRUE(taken(encoding).insert(page).second);
    }
    return absl::OkStatus();
  }
  void Return(PageEncoding encoding, std::byte* page) override {
    EXPECT_EQ(taken(encoding).erase(page), 1u);
  }

  size_t num_taken(PageEncoding encoding) { return taken(encoding).size(); }
  size_t limit[2] = {10'000, 10'000};

 private:
  static size_t Index(PageEncoding encoding) { return encoding == PageEncoding::kInt2 ? 0 : 1; }
  std::set<std::byte*>& taken(PageEncoding encoding) { return taken_[Index(encoding)]; }
  size_t available(PageEncoding encoding) {
    return limit[Index(encoding)] - std::min(limit[Index(encoding)], num_taken(encoding));
  }

  std::vector<std::byte> memory_ = std::vector<std::byte>(100'000);
  size_t next_ = 0;
  std::set<std::byte*> taken_[2];
};

class GpuPageTableTest : public testing::Test {
 protected:
  explicit GpuPageTableTest(const Windows& windows = {.sink_tokens = 64, .recent_tokens = 128})
      : profile_(MakeTestProfile({.windows = windows})),
        table_(std::make_unique<GpuPageTable>(
            GpuPageTable::Shape{.geometry = profile_->geometry(), .windows = windows}, &source_)),
        model_({.geometry = profile_->geometry(),
                .heads = {0, profile_->geometry().num_kv_heads},
                .windows = windows,
                .profile_id = profile_->id()}) {}

  // What the pages of a prefix have, on both sides.
  void Adopt(const std::vector<PageContent>& pages) {
    const auto num_pages = static_cast<uint32_t>(pages.size());
    auto prefix = std::make_shared<FakePrefix>(profile_, num_pages);
    std::vector<GpuPageTable::SharedPage> shared(num_pages);
    for (uint32_t page = 0; page < num_pages; ++page) {
      shared_bytes_.resize(size_t{2} * num_pages);
      if (pages[page].has_int2) {
        shared[page].int2 = &shared_bytes_[size_t{2} * page];
        prefix->Put(PageIdx(page), PageEncoding::kInt2, Image(PageEncoding::kInt2));
      }
      if (pages[page].has_bf16) {
        shared[page].bf16 = &shared_bytes_[size_t{2} * page + 1];
        prefix->Put(PageIdx(page), PageEncoding::kBf16, Image(PageEncoding::kBf16));
      }
    }
    const absl::Status status = model_.Adopt(prefix);
    EXPECT_EQ(table_->Adopt(shared).code(), status.code());
    length_ = status.ok() ? num_pages * kPageTokens : 0;
  }
  std::vector<std::byte> Image(PageEncoding encoding) const {
    return std::vector<std::byte>(profile_->geometry().PageBytes(encoding));
  }

  void ModelDemote(uint32_t length) {
    auto demotions = model_.PlanDemotion(length);
    ASSERT_TRUE(demotions.ok());
    model_.CommitDemotion(*std::move(demotions));
  }
  void Step(uint32_t num_tokens) {
    ASSERT_TRUE(table_->Reserve(length_, num_tokens).ok());
    ExpectSound(table_->overdue());
    table_->CommitOverdue();
    ModelDemote(length_);
    ASSERT_TRUE(model_.Extend((length_ + num_tokens + kPageTokens - 1) / kPageTokens).ok());
    ExpectTheModel();
    ExpectSound(table_->due());
    length_ += num_tokens;
    table_->Commit();
    ModelDemote(length_);
    ExpectTheModel();
  }
  static void ExpectSound(std::span<const GpuPageTable::Demotion> demotions) {
    for (const GpuPageTable::Demotion& demotion : demotions) {
      EXPECT_NE(demotion.bf16, nullptr);
    }
  }

  void ExpectTheModel() {
    ASSERT_EQ(table_->num_pages(), model_.num_pages());
    std::set<const std::byte*> history;
    std::vector<const std::byte*> windows;
    for (uint32_t p = 0; p < table_->num_pages(); ++p) {
      const PageIdx page(p);
      ASSERT_EQ(table_->in_history(page), model_.in_history(page)) << "page " << p;
      for (const PageEncoding encoding : kEncodings) {
        ASSERT_EQ(table_->Page(page, encoding) != nullptr,
                  model_.Block(page, encoding, 0, 0) != nullptr)
            << "page " << p;
      }
      if (table_->in_history(page)) {
        ASSERT_TRUE(history.insert(table_->Page(page, PageEncoding::kInt2)).second);
      } else {
        windows.push_back(table_->Page(page, PageEncoding::kBf16));
      }
    }
    const std::set<const std::byte*> got(table_->history().begin(), table_->history().end());
    ASSERT_EQ(got.size(), table_->history().size());
    ASSERT_EQ(got, history);
    ASSERT_TRUE(
        std::equal(history_before_.begin(), history_before_.end(), table_->history().begin()))
        << "history only grows";
    history_before_.assign(table_->history().begin(), table_->history().end());
    std::vector<const std::byte*> got_windows;
    table_->CollectWindows(&got_windows);
    ASSERT_EQ(got_windows, windows);
    const Sequence::Footprint a = table_->footprint();
    const Sequence::Footprint b = model_.footprint();
    ASSERT_EQ(a.own_int2_bytes, b.own_int2_bytes);
    ASSERT_EQ(a.own_bf16_bytes, b.own_bf16_bytes);
    ASSERT_EQ(a.shared_int2_bytes, b.shared_int2_bytes);
    ASSERT_EQ(a.shared_bf16_bytes, b.shared_bf16_bytes);
  }

  std::shared_ptr<const Profile> profile_;
  FakeSource source_;
  std::unique_ptr<GpuPageTable> table_;
  PageTable model_;
  std::vector<std::byte> shared_bytes_;
  std::vector<const std::byte*> history_before_;
  uint32_t length_ = 0;
};

TEST_F(GpuPageTableTest, TokenByTokenIsTheModel) {
  for (uint32_t i = 0; i < 700; ++i) {
    ASSERT_NO_FATAL_FAILURE(Step(1));
    ASSERT_EQ(source_.num_taken(PageEncoding::kInt2), table_->history().size());
  }
  table_ = nullptr;
  EXPECT_EQ(source_.num_taken(PageEncoding::kInt2), 0u);
  EXPECT_EQ(source_.num_taken(PageEncoding::kBf16), 0u);
}

TEST_F(GpuPageTableTest, ReleasedStepLeavesNothing) {
  ASSERT_NO_FATAL_FAILURE(Step(500));
  const size_t int2 = source_.num_taken(PageEncoding::kInt2);
  const size_t bf16 = source_.num_taken(PageEncoding::kBf16);
  ASSERT_TRUE(table_->Reserve(length_, 400).ok());
  EXPECT_EQ(source_.num_taken(PageEncoding::kInt2), int2 + table_->due().size());
  EXPECT_GT(table_->due().size(), 0u);
  table_->Release();
  table_->Release();
  EXPECT_EQ(source_.num_taken(PageEncoding::kInt2), int2);
  EXPECT_EQ(source_.num_taken(PageEncoding::kBf16), bf16);
  ExpectTheModel();
}

TEST_F(GpuPageTableTest, WithoutPagesForAllThatAStepNeedsNothingIsTaken) {
  ASSERT_NO_FATAL_FAILURE(Step(500));
  const size_t int2 = source_.num_taken(PageEncoding::kInt2);
  const size_t bf16 = source_.num_taken(PageEncoding::kBf16);
  for (const size_t encoding : {0u, 1u}) {
    FakeSource& source = source_;
    const size_t before = std::exchange(source.limit[encoding], (encoding == 0 ? int2 : bf16) + 2);
    EXPECT_EQ(table_->Reserve(length_, 400).code(), absl::StatusCode::kResourceExhausted);
    EXPECT_EQ(source_.num_taken(PageEncoding::kInt2), int2);
    EXPECT_EQ(source_.num_taken(PageEncoding::kBf16), bf16);
    source.limit[encoding] = before;
    ExpectTheModel();
  }
  ASSERT_NO_FATAL_FAILURE(Step(400));
}

TEST_F(GpuPageTableTest, PagesThatThePrefixHasInBf16AloneAreOverdue) {
  std::vector<PageContent> pages(10, {.has_int2 = true, .has_bf16 = false});
  pages[0] = {.has_int2 = false, .has_bf16 = true};
  pages[3] = {.has_int2 = false, .has_bf16 = true};
  pages[9] = {.has_int2 = true, .has_bf16 = true};
  Adopt(pages);
  ASSERT_TRUE(table_->Reserve(length_, 1).ok());
  ASSERT_EQ(table_->overdue().size(), 1u);
  EXPECT_EQ(table_->overdue()[0].page, PageIdx(3));
  EXPECT_EQ(table_->overdue()[0].bf16, &shared_bytes_[7]);
  EXPECT_NE(table_->overdue()[0].int2, nullptr);
  table_->CommitOverdue();
  EXPECT_TRUE(table_->in_history(PageIdx(3)));
  table_->Release();
  EXPECT_TRUE(table_->in_history(PageIdx(3))) << "what was committed stays";
  ModelDemote(length_);
  ExpectTheModel();
}

TEST_F(GpuPageTableTest, PrefixThatLacksWhatAPageNeedsIsRefusedAndNothingIsAdopted) {
  std::vector<GpuPageTable::SharedPage> pages(3, {.int2 = &shared_bytes_.emplace_back()});
  absl::Status status = table_->Adopt(pages);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("page 0 (tokens 0 to 63)"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("the sink needs"));
  pages[0].bf16 = pages[0].int2;
  pages[2].int2 = nullptr;
  status = table_->Adopt(pages);
  EXPECT_THAT(std::string(status.message()), HasSubstr("page 2 (tokens 128 to 191)"));
  EXPECT_EQ(table_->num_pages(), 0u);
}

struct ModelCase {
  Windows windows;
  uint32_t seed;
};

class GpuPageTableModelTest : public GpuPageTableTest,
                              public testing::WithParamInterface<ModelCase> {
 protected:
  GpuPageTableModelTest() : GpuPageTableTest(GetParam().windows) {}
};

TEST_P(GpuPageTableModelTest, AnyOperationsLeaveBothAlike) {
  std::mt19937 random(GetParam().seed);
  SCOPED_TRACE(testing::Message() << "seed " << GetParam().seed);
  if (random() % 4 != 0) {
    std::vector<PageContent> pages(1 + random() % 12);
    for (PageContent& page : pages) {
      const auto kind = random() % 8;
      page = {.has_int2 = kind != 0 && kind != 1, .has_bf16 = kind < 3};
    }
    for (uint32_t p = 0; p < pages.size() && p < GetParam().windows.sink_tokens / 64; ++p) {
      pages[p].has_bf16 = true;
    }
    Adopt(pages);
    ExpectTheModel();
  }
  for (int i = 0; i < 60; ++i) {
    switch (random() % 8) {
      case 0: {
        const auto first = static_cast<uint32_t>(random() % (table_->num_pages() + 4));
        const auto end = first + static_cast<uint32_t>(random() % 4);
        EXPECT_EQ(table_->Retain(first, end).code(), model_.Retain(first, end).code());
        break;
      }
      case 1:
        table_->ReleaseRetained();
        model_.ReleaseRetained();
        break;
      case 2:
        ASSERT_TRUE(table_->Reserve(length_, 1 + static_cast<uint32_t>(random() % 200)).ok());
        if (random() % 2 == 0) {
          table_->CommitOverdue();
          ModelDemote(length_);
        }
        table_->Release();
        break;
      case 3:
        ASSERT_NO_FATAL_FAILURE(Step(1 + static_cast<uint32_t>(random() % 200)));
        break;
      default:
        ASSERT_NO_FATAL_FAILURE(Step(1 + static_cast<uint32_t>(random() % 20)));
    }
    ASSERT_NO_FATAL_FAILURE(ExpectTheModel());
  }
  table_ = nullptr;
  EXPECT_EQ(source_.num_taken(PageEncoding::kInt2), 0u);
  EXPECT_EQ(source_.num_taken(PageEncoding::kBf16), 0u);
}

std::vector<ModelCase> ModelCases() {
  std::vector<ModelCase> cases;
  for (uint32_t seed = 0; seed < 60; ++seed) {
    const uint32_t sinks[] = {0, 64, 128};
    const uint32_t recents[] = {0, 64, 256};
    cases.push_back(
        {{.sink_tokens = sinks[seed % 3], .recent_tokens = recents[seed / 3 % 3]}, seed});
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Seeds, GpuPageTableModelTest, testing::ValuesIn(ModelCases()));

}  // namespace
}  // namespace crumb
