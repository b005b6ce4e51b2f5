// SPDX-License-Identifier: Apache-2.0
//
// Pages of which a publish writes the copy in the tier beside too, on a fake device.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <utility>

#include "tests/daemon/store/copies_fixture.h"

namespace crumb {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class ReservedCopiesTest : public CopiesTest {
 protected:
  struct Writing {
    PublishId id;
    WriteGuard guard;
    std::vector<WrittenBlock> written;
    std::vector<std::optional<CopyPlace>> places;  // Of each INT2 block of the plan.
  };

  Writing Begin(std::string_view letters, SessionId session, HeadRange heads = kAllHeads) {
    Writing writing;
    auto plan = store_->BeginPublish(session, "", PagesOf(letters));
    EXPECT_EQ(absl::OkStatus(), plan.status());
    writing.id = plan->id;
    Write(letters, session, heads, &writing);
    return writing;
  }
  // Writes everything, INT2 in both places where there is one.
  void Write(std::string_view letters, SessionId session, HeadRange heads, Writing* writing) {
    auto guard = store_->BeginWrite(session, writing->id);
    ASSERT_EQ(absl::OkStatus(), guard.status());
    writing->guard = *std::move(guard);
    writing->written.clear();
    writing->places.clear();
    for (const WritableBlock& block : writing->guard.blocks()) {
      writing->written.push_back(WriteBlock(block, "", PagesOf(letters), heads, kGeometry));
      if (block.key.encoding == PageEncoding::kInt2) {
        const auto place = writing->guard.ReserveCopy(block);
        writing->places.push_back(place);
        writing->written.back().is_copied = place.has_value();
        if (place.has_value()) {
          tier_->Put(*place, block.bytes);
        }
      }
    }
  }
  void Commit(Writing writing, SessionId session) {
    writing.guard = WriteGuard();
    ASSERT_EQ(absl::OkStatus(),
              store_->CommitPublish(session, writing.id, writing.written).status());
  }
  void ExpectNoCopies() {
    EXPECT_EQ(0u, store_->Status().copies);
    EXPECT_EQ(0u, store_->Status().copy_used_bytes);
    EXPECT_EQ(absl::OkStatus(), store_->CheckInvariants());
  }
};

TEST_F(ReservedCopiesTest, BothPlacesAreReadableInTheStepOfTheCommit) {
  Writing writing = Begin("abcd", session_);
  EXPECT_EQ(absl::OkStatus(), store_->CheckInvariants());
  EXPECT_THAT(Lookup("abcd", 64).pages, IsEmpty());
  Commit(std::move(writing), session_);
  const LookupResult found = Lookup("abcd", 64);
  EXPECT_THAT(CopiedPages(found), ElementsAre(1, 2, 3));
  for (const uint32_t page : {1u, 2u, 3u}) {
    ExpectCopyHolds(*found.pages[page].int2_copy, Int2(page), "abcd");
  }
  EXPECT_EQ(3u, store_->Status().counters.copies);
  EXPECT_EQ(3u, CopyEverything()) << "the sink and the tail of two, in BF16";
}

TEST_F(ReservedCopiesTest, AbortedPublishGivesItsPlacesBack) {
  Writing writing = Begin("abcd", session_);
  writing.guard = WriteGuard();
  EXPECT_EQ(3u, store_->Status().copies);
  ASSERT_EQ(absl::OkStatus(), store_->AbortPublish(session_, writing.id));
  ExpectNoCopies();
}

TEST_F(ReservedCopiesTest, PlacesOfADeadSessionStayAsLongAsTheyAreWritten) {
  const SessionId other = Attach();
  Writing writing = Begin("abcd", other);
  store_->EndSession(other);
  EXPECT_EQ(3u, store_->Status().copies);
  EXPECT_EQ(absl::OkStatus(), store_->CheckInvariants());
  writing.guard = WriteGuard();
  ExpectNoCopies();
}

TEST_F(ReservedCopiesTest, SecondAttemptToWriteFindsTheSamePlaces) {
  Writing writing = Begin("abcd", session_);
  const auto before = writing.places;
  writing.guard = WriteGuard();
  Write("abcd", session_, kAllHeads, &writing);
  ASSERT_EQ(before.size(), writing.places.size());
  for (size_t i = 0; i < before.size(); ++i) {
    ASSERT_TRUE(before[i].has_value() && writing.places[i].has_value());
    EXPECT_EQ(before[i]->segment, writing.places[i]->segment);
    EXPECT_EQ(before[i]->offset, writing.places[i]->offset);
  }
  Commit(std::move(writing), session_);
  EXPECT_EQ(3u, store_->Status().counters.copies);
}

TEST_F(ReservedCopiesTest, CopyThatDidNotArriveIsMadeLater) {
  Writing writing = Begin("abcd", session_);
  writing.written[2].is_copied = false;  // Page 2: the sink's BF16 is first, then INT2 of 1 and 2.
  ASSERT_EQ(Int2(2), (PageKey{writing.written[2].page, writing.written[2].encoding}));
  Commit(std::move(writing), session_);
  EXPECT_THAT(CopiedPages(Lookup("abcd", 64)), ElementsAre(1, 3));
  EXPECT_EQ(absl::OkStatus(), store_->CheckInvariants());
  CopyEverything();
  EXPECT_THAT(CopiedPages(Lookup("abcd", 64)), ElementsAre(1, 2, 3));
}

TEST_F(ReservedCopiesTest, LaterOfTwoPublishesOfOnePrefixGivesItsPlacesBack) {
  RestartWith(8);
  const SessionId other = Attach();
  Writing first = Begin("abcd", session_);
  Writing second = Begin("abcd", other);
  EXPECT_EQ(6u, store_->Status().copies);
  Commit(std::move(second), other);
  Commit(std::move(first), session_);
  EXPECT_EQ(3u, store_->Status().copies);
  const LookupResult found = Lookup("abcd", 64);
  ExpectCopyHolds(*found.pages[2].int2_copy, Int2(2), "abcd");
}

TEST_F(ReservedCopiesTest, RanksWriteTheirHeadsOfOneCopy) {
  const SessionId low = AttachReader("default", {0, 2});
  const SessionId high = AttachReader("default", {2, 2});
  Writing of_low = Begin("abcd", low, {0, 2});
  Writing of_high = Begin("abcd", high, {2, 2});
  EXPECT_EQ(3u, store_->Status().copies);
  EXPECT_EQ(of_low.places[0]->offset + 2 * kGeometry.HeadRangeBytes(PageEncoding::kInt2),
            of_high.places[0]->offset);
  Commit(std::move(of_high), high);
  EXPECT_THAT(CopiedPages(Lookup("abcd", 64)), IsEmpty());
  Commit(std::move(of_low), low);
  const LookupResult found = Lookup("abcd", 64);
  EXPECT_THAT(CopiedPages(found), ElementsAre(1, 2, 3));
  ExpectCopyHolds(*found.pages[1].int2_copy, Int2(1), "abcd");
}

TEST_F(ReservedCopiesTest, ColdCopiesMakeRoomAndHeldOnesDoNot) {
  RestartWith(1);  // Nine blocks of INT2.
  Commit(Begin("abcdefgh", session_), session_);
  EXPECT_EQ(0u, CopyEverything()) << "of BF16 there is no segment for";
  EXPECT_EQ(7u, store_->Status().copies);
  const LookupResult held = Lookup("abcde", 128);
  const Writing writing = Begin("ABCDEFGH", session_);
  size_t num_places = 0;
  for (const auto& place : writing.places) {
    num_places += place.has_value() ? 1u : 0u;
  }
  EXPECT_EQ(5u, num_places) << "two that were free, and those of f, g and h";
  EXPECT_EQ(3u, store_->Status().counters.dropped_copies);
  ExpectCopyHolds(*held.pages[4].int2_copy, Int2(4), "abcde");
}

TEST_F(ReservedCopiesTest, GeometryThatTheTierRefusesHasNoPlace) {
  tier_->refused_key_dim = kGeometry.key_dim;
  const Writing writing = Begin("abcd", session_);
  EXPECT_FALSE(writing.places[0].has_value());
}

TEST_F(ReservedCopiesTest, StoreWithoutATierHasNoPlace) {
  Restart({});
  const Writing writing = Begin("abcd", session_);
  EXPECT_FALSE(writing.places[0].has_value());
}

}  // namespace
}  // namespace crumb
