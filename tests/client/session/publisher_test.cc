// SPDX-License-Identifier: Apache-2.0
#include "client/session/publisher.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/client/sequence/sequence_testing.h"
#include "tests/support/test_profile.h"

namespace crumb {
namespace {

using testing::HasSubstr;

constexpr PageEncoding kInt2 = PageEncoding::kInt2;
constexpr PageEncoding kBf16 = PageEncoding::kBf16;

// Sink 64, recent 128, so that of 512 tokens pages 1..5 are history.
class PlanPublishTest : public testing::Test {
 protected:
  void Fill(uint32_t length) {
    const Activations activations(*profile_, 2, length, /*seed=*/1);
    while (sequence_->length() < length) {
      ASSERT_TRUE(RunChunk(sequence_.get(), activations, 64).ok());
    }
  }
  static MissingPages Missing(std::initializer_list<uint32_t> int2,
                              std::initializer_list<uint32_t> bf16) {
    MissingPages missing;
    for (const uint32_t page : int2) {
      missing.int2.emplace_back(page);
    }
    for (const uint32_t page : bf16) {
      missing.bf16.emplace_back(page);
    }
    return missing;
  }
  std::string Plan(const MissingPages& missing) {
    const auto plan = PlanPublish(missing, SequenceExporter(*sequence_), profile_->windows());
    if (!plan.ok()) {
      return std::string(plan.status().message());
    }
    std::string words;
    for (const PlannedPage& page : *plan) {
      words += std::to_string(page.page.value()) + (page.encoding == kInt2 ? ":int2" : ":bf16") +
               (page.is_tail ? "+tail " : " ");
    }
    return words;
  }

  std::shared_ptr<const Profile> profile_ = MakeTestProfile();
  std::unique_ptr<Sequence> sequence_ =
      *Sequence::Create({.profile = profile_, .num_query_heads = 2});
};

TEST_F(PlanPublishTest, EachPageGoesAsItIsHeld) {
  Fill(512);
  EXPECT_EQ(Plan(Missing({1, 2, 3, 4, 5, 6, 7}, {0, 6, 7})),
            "0:bf16 1:int2 2:int2 3:int2 4:int2 5:int2 6:bf16+tail 7:bf16+tail ");
}

TEST_F(PlanPublishTest, RetainedTailGoesInBf16ThoughHeldInInt2Too) {
  ASSERT_TRUE(sequence_->RetainTail(256).ok());
  Fill(512);
  EXPECT_EQ(Plan(Missing({1, 2, 3}, {0, 2, 3})), "0:bf16 1:int2 2:bf16+tail 3:bf16+tail ");
}

TEST_F(PlanPublishTest, TailThatIsGoneGoesInInt2) {
  Fill(512);
  EXPECT_EQ(Plan(Missing({1, 2, 3}, {0, 2, 3})), "0:bf16 1:int2 2:int2 3:int2 ");
  EXPECT_EQ(Plan(Missing({}, {2, 3})), "") << "its INT2 rows are there already";
}

TEST_F(PlanPublishTest, PageOfTheWindowGoesInBf16ThoughOnlyInt2IsMissing) {
  Fill(512);
  EXPECT_EQ(Plan(Missing({6}, {})), "6:bf16 ");
}

TEST_F(PlanPublishTest, PageThatIsNotHeldIsNamed) {
  Fill(512);
  EXPECT_THAT(Plan(Missing({9}, {})), HasSubstr("page 9 is missing at the daemon"));
}

}  // namespace
}  // namespace crumb
