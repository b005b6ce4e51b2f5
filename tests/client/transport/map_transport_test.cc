// SPDX-License-Identifier: Apache-2.0
#include "client/transport/map_transport.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <string>
#include <thread>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/client/transport/fake_arena.h"
#include "tests/support/fake_clock.h"
#include "tests/support/test_profile.h"

namespace crumb {
namespace {

using testing::HasSubstr;

class MapTransportTest : public testing::Test {
 protected:
  static absl::Time In(absl::Duration duration) { return Clock::System().Now() + duration; }

  FakeArena arena_{MakeTestProfile()};
  std::unique_ptr<MapTransport> transport_ =
      *MapTransport::Connect({}, arena_.session(), In(absl::Seconds(10)));
};

TEST_F(MapTransportTest, StagingIsWhatTheDaemonWasGivenAndCannotShrinkOrGrow) {
  const auto staging = transport_->AcquireStaging(3 << 20, In(absl::Seconds(10)));
  ASSERT_TRUE(staging.ok()) << staging.status();
  ASSERT_GE(staging->size(), size_t{3} << 20);
  (*staging)[12345] = std::byte{42};
  const UniqueFd memfd = arena_.TakeStaging();
  EXPECT_EQ(arena_.staging_bytes(), staging->size());
  std::byte read{};
  ASSERT_EQ(::pread(memfd.get(), &read, 1, 12345), 1);
  EXPECT_EQ(read, std::byte{42});
  EXPECT_NE(::ftruncate(memfd.get(), 1), 0);
  EXPECT_NE(::ftruncate(memfd.get(), 64 << 20), 0);
  transport_->ReleaseStaging(false);
}

TEST_F(MapTransportTest, StagingIsReusedWhileItIsLargeEnoughAndReplacedWhenDiscarded) {
  const auto acquire = [&](size_t bytes) {
    EXPECT_TRUE(transport_->AcquireStaging(bytes, In(absl::Seconds(10))).ok());
    return arena_.num_requests();
  };
  EXPECT_EQ(acquire(100), 1);
  transport_->ReleaseStaging(false);
  EXPECT_EQ(acquire(1 << 20), 1);
  transport_->ReleaseStaging(false);
  EXPECT_EQ(acquire(2 << 20), 2);
  transport_->ReleaseStaging(/*discard=*/true);
  EXPECT_EQ(acquire(100), 3) << "the daemon may still have been reading the old one";
  transport_->ReleaseStaging(false);
}

TEST_F(MapTransportTest, OnePublishAtATimeAndTheNextWaitsNoLongerThanItsDeadline) {
  ASSERT_TRUE(transport_->AcquireStaging(100, In(absl::Seconds(10))).ok());
  const absl::Status late = transport_->AcquireStaging(100, In(absl::Milliseconds(30))).status();
  EXPECT_EQ(late.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(late.message()), HasSubstr("another publish"));
  std::thread next([&] {
    EXPECT_TRUE(transport_->AcquireStaging(100, In(absl::Seconds(10))).ok());
    transport_->ReleaseStaging(false);
  });
  transport_->ReleaseStaging(false);
  next.join();
}

TEST_F(MapTransportTest, RefusedStagingIsNotHeld) {
  arena_.SetStatus(absl::ResourceExhaustedError("no more"));
  EXPECT_EQ(transport_->AcquireStaging(100, In(absl::Seconds(10))).status().code(),
            absl::StatusCode::kResourceExhausted);
  arena_.SetStatus(absl::OkStatus());
  EXPECT_TRUE(transport_->AcquireStaging(100, In(absl::Seconds(10))).ok());
  transport_->ReleaseStaging(false);
  EXPECT_EQ(transport_->AcquireStaging(kMaxStagingBytes + 1, In(absl::Seconds(10))).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(MapTransportTest, IdleStagingIsExchangedForASmallOne) {
  FakeClock clock;
  auto transport =
      *MapTransport::Connect({}, arena_.session(), clock.Now() + absl::Hours(1), clock);
  ASSERT_TRUE(transport->AcquireStaging(8 << 20, clock.Now() + absl::Hours(1)).ok());
  transport->Maintain();
  EXPECT_GE(arena_.staging_bytes(), 8u << 20) << "it is held";
  transport->ReleaseStaging(false);
  clock.Advance(absl::Seconds(29));
  transport->Maintain();
  EXPECT_GE(arena_.staging_bytes(), 8u << 20);
  clock.Advance(absl::Seconds(1));
  transport->Maintain();
  EXPECT_EQ(arena_.staging_bytes(), 1u << 20);
}

}  // namespace
}  // namespace crumb
