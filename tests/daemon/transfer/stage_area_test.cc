// SPDX-License-Identifier: Apache-2.0
#include "daemon/transfer/stage_area.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/support/fake_clock.h"

namespace crumb {
namespace {

using testing::HasSubstr;

constexpr size_t kMiB = size_t{1} << 20;
constexpr SessionId kSession(1);

class StageAreaTest : public testing::Test {
 protected:
  // Sends `bytes` bytes of `fill` in one message.
  void Send(PublishId publish, size_t bytes, int fill, SessionId session = kSession) {
    SendAt(publish, 0, bytes, fill, session);
  }
  void SendAt(
      PublishId publish, size_t offset, size_t bytes, int fill, SessionId session = kSession) {
    StageMessage message;
    message.publish_id = publish.value();
    message.offset = offset;
    message.request_bytes = bytes;
    const auto place = area_.Reserve(session, message, bytes);
    ASSERT_TRUE(place.ok()) << place.status();
    ASSERT_EQ(place->bytes.size(), bytes);
    std::memset(place->bytes.data(), fill, bytes);
    EXPECT_TRUE(area_.Landed(*place).has_value());
  }
  const std::byte* AddressOf(PublishId publish) {
    const auto found = area_.Find(kSession, publish);
    EXPECT_TRUE(found.ok()) << found.status();
    return found.ok() ? (*found)->bytes().data() : nullptr;
  }

  FakeClock clock_;
  StageArea area_{{.max_bytes = 64 * kMiB, .max_kept_bytes = 8 * kMiB}, clock_};
};

TEST_F(StageAreaTest, BytesAreFoundUntilTheyAreDroppedAndStayForWhoHoldsThem) {
  Send(PublishId(1), 1000, 7);
  EXPECT_EQ(AddressOf(PublishId(1)), AddressOf(PublishId(1)));
  auto held = *area_.Find(kSession, PublishId(1));
  area_.Drop(kSession, PublishId(1));
  EXPECT_THAT(std::string(area_.Find(kSession, PublishId(1)).status().message()),
              HasSubstr("send its pages before the commit"));
  EXPECT_EQ(area_.used_bytes(), 1000u) << "a commit still reads it";
  EXPECT_EQ(area_.kept_bytes(), 0u);
  Send(PublishId(2), 1000, 8);
  EXPECT_TRUE(std::ranges::all_of(held->bytes(), [](std::byte b) { return b == std::byte{7}; }));
  held = nullptr;
  EXPECT_EQ(area_.used_bytes(), 1000u);
  EXPECT_GT(area_.kept_bytes(), 0u);
}

TEST_F(StageAreaTest, MemoryOfAnEndedPublishServesTheSameSessionsNext) {
  Send(PublishId(1), 5 * kMiB, 7);
  const std::byte* first = AddressOf(PublishId(1));
  area_.Drop(kSession, PublishId(1));
  EXPECT_EQ(area_.used_bytes(), 0u);
  EXPECT_EQ(area_.kept_bytes(), 6 * kMiB) << "in huge pages";
  Send(PublishId(2), 100, 8);
  const auto found = area_.Find(kSession, PublishId(2));
  ASSERT_TRUE(found.ok());
  EXPECT_EQ((*found)->bytes().data(), first);
  EXPECT_EQ((*found)->bytes().size(), 100u);
  EXPECT_EQ(area_.kept_bytes(), 0u) << "it is in use";
}

TEST_F(StageAreaTest, NoSessionReadsWhatAnotherOneStaged) {
  Send(PublishId(1), 5 * kMiB, 7);
  area_.Drop(kSession, PublishId(1));
  EXPECT_GT(area_.kept_bytes(), 0u);
  SendAt(PublishId(2), 2 * kMiB, 100, 8, SessionId(2));
  const auto found = area_.Find(SessionId(2), PublishId(2));
  ASSERT_TRUE(found.ok());
  ASSERT_EQ((*found)->bytes().size(), 2 * kMiB + 100);
  EXPECT_TRUE(std::ranges::all_of((*found)->bytes().first(2 * kMiB),
                                  [](std::byte b) { return b == std::byte{0}; }));
  area_.DropSession(kSession);
  EXPECT_EQ(area_.kept_bytes(), 0u) << "no one else may have it";
}

TEST_F(StageAreaTest, RequestsMayFillWhatWasFilledBefore) {
  SendAt(PublishId(1), 0, 3000, 1);
  SendAt(PublishId(1), 4000, 2000, 2);
  SendAt(PublishId(1), 0, 1000, 3);
  EXPECT_EQ(area_.used_bytes(), 6000u) << "each byte counts once";
  const auto found = area_.Find(kSession, PublishId(1));
  ASSERT_TRUE(found.ok());
  const auto bytes = (*found)->bytes();
  ASSERT_EQ(bytes.size(), 6000u);
  EXPECT_EQ(bytes[0], std::byte{3});
  EXPECT_EQ(bytes[1000], std::byte{1});
  EXPECT_EQ(bytes[4000], std::byte{2});
}

TEST_F(StageAreaTest, RequestsComeOneAfterAnotherAndTheirPiecesInOrder) {
  StageMessage message;
  message.publish_id = 1;
  message.offset = 500;
  message.request_bytes = 100;
  const auto first = area_.Reserve(kSession, message, 60);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_FALSE(area_.Find(kSession, PublishId(1)).ok()) << "nothing is there yet";
  const auto refused = [&](size_t offset, size_t request_offset, size_t bytes) {
    message.offset = offset;
    message.request_offset = request_offset;
    return area_.Reserve(kSession, message, bytes).status().code() ==
           absl::StatusCode::kInvalidArgument;
  };
  EXPECT_TRUE(refused(900, 0, 100)) << "another request";
  EXPECT_TRUE(refused(570, 70, 30)) << "not the next bytes";
  EXPECT_TRUE(refused(660, 60, 40)) << "of another request";
  EXPECT_TRUE(refused(560, 60, 41)) << "more than was announced";
  message.offset = 560;
  message.request_offset = 60;
  const auto second = area_.Reserve(kSession, message, 40);
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_FALSE(area_.Landed(*first).has_value());
  EXPECT_TRUE(refused(900, 0, 100)) << "the request is not complete";
  EXPECT_TRUE(area_.Landed(*second).has_value());
  EXPECT_EQ((*area_.Find(kSession, PublishId(1)))->bytes().size(), 600u);
  EXPECT_FALSE(refused(900, 0, 100));
}

TEST_F(StageAreaTest, WhatIsKeptIsBoundedAndGoesWhenNobodyPublishesForAWhile) {
  for (uint64_t publish = 1; publish <= 5; ++publish) {
    Send(PublishId(publish), 5 * kMiB, 7);
  }
  for (uint64_t publish = 1; publish <= 5; ++publish) {
    area_.Drop(kSession, PublishId(publish));
  }
  EXPECT_EQ(area_.used_bytes(), 0u);
  EXPECT_EQ(area_.kept_bytes(), 8 * kMiB) << "of 25 MiB";
  clock_.Advance(absl::Seconds(29));
  area_.Tick(clock_.Now());
  EXPECT_EQ(area_.kept_bytes(), 8 * kMiB);
  clock_.Advance(absl::Seconds(2));
  Send(PublishId(9), 1, 7);
  area_.Tick(clock_.Now());
  EXPECT_GT(area_.kept_bytes(), 0u) << "someone publishes";
  area_.Drop(kSession, PublishId(9));
  clock_.Advance(absl::Seconds(31));
  area_.Tick(clock_.Now());
  EXPECT_EQ(area_.kept_bytes(), 0u);
}

TEST_F(StageAreaTest, WhatIsStagedIsBoundedAndForgottenWhenItIsLeftAlone) {
  Send(PublishId(1), 40 * kMiB, 1);
  StageMessage message;
  message.publish_id = 2;
  message.request_bytes = 40 * kMiB;
  const absl::Status refused = area_.Reserve(kSession, message, kMiB).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("41943040 of 67108864 bytes"));
  clock_.Advance(absl::Seconds(100));
  EXPECT_NE(AddressOf(PublishId(1)), nullptr) << "a commit that may be repeated";
  clock_.Advance(absl::Seconds(100));
  area_.Tick(clock_.Now());
  EXPECT_NE(AddressOf(PublishId(1)), nullptr);
  clock_.Advance(absl::Seconds(121));
  area_.Tick(clock_.Now());
  EXPECT_FALSE(area_.Find(kSession, PublishId(1)).ok());
  EXPECT_EQ(area_.used_bytes(), 0u);
}

}  // namespace
}  // namespace crumb
