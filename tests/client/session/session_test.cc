// SPDX-License-Identifier: Apache-2.0
#include "client/session/session.h"

#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/support/fake_clock.h"
#include "tests/support/test_profile.h"

namespace crumb {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::UnorderedElementsAre;

constexpr absl::Duration kLease = absl::Seconds(30);

class SessionTest : public testing::Test {
 protected:
  static AttachedSession Attached() {
    AttachedSession attached;
    attached.info.id = SessionId(7);
    attached.info.epoch = 1234;
    attached.info.profile = MakeTestProfile();
    attached.lease = kLease;
    return attached;
  }
  static std::string Words(const absl::Status& status) { return std::string(status.message()); }

  FakeClock clock_;
  Session session_{nullptr, Attached(), {}, clock_};
};

TEST_F(SessionTest, LeaseRunsOutOnTheClientsOwnClock) {
  session_.AddLease(LeaseId(3), clock_.Now() + kLease);
  clock_.Advance(kLease - absl::Milliseconds(1));
  EXPECT_TRUE(session_.CheckLease(LeaseId(3)).ok());
  clock_.Advance(absl::Milliseconds(1) + absl::Seconds(12));
  const absl::Status status = session_.CheckLease(LeaseId(3));
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Words(status),
              HasSubstr("lease 3 of session 7 of daemon epoch 1234 ran out 12s ago"));
}

TEST_F(SessionTest, RenewalCountsFromTheMomentItWasSent) {
  session_.AddLease(LeaseId(3), clock_.Now() + kLease);
  clock_.Advance(absl::Seconds(10));
  const absl::Time sent_at = clock_.Now();
  clock_.Advance(absl::Seconds(5));  // The answer took its time.
  session_.Renewed({LeaseId(3)}, {.lease_for = kLease, .ended = {}}, sent_at);
  clock_.Advance(absl::Seconds(24));
  EXPECT_TRUE(session_.CheckLease(LeaseId(3)).ok());
  clock_.Advance(absl::Seconds(1));
  EXPECT_FALSE(session_.CheckLease(LeaseId(3)).ok());
}

TEST_F(SessionTest, LeaseThatTheDaemonEndedIsOverAtOnce) {
  session_.AddLease(LeaseId(3), clock_.Now() + kLease);
  session_.AddLease(LeaseId(4), clock_.Now() + kLease);
  session_.Renewed({LeaseId(3), LeaseId(4)}, {.lease_for = kLease, .ended = {LeaseId(3)}},
                   clock_.Now());
  EXPECT_THAT(Words(session_.CheckLease(LeaseId(3))), HasSubstr("ended by the daemon"));
  EXPECT_TRUE(session_.CheckLease(LeaseId(4)).ok());
}

TEST_F(SessionTest, ReleasedLeasesAreToldOnceAndRenewedNoMore) {
  for (const uint64_t lease : {3u, 4u, 5u}) {
    session_.AddLease(LeaseId(lease), clock_.Now() + kLease);
  }
  session_.ReleaseLease(LeaseId(4));
  session_.ReleaseLease(LeaseId(4));
  session_.ReleaseLease(LeaseId(99));
  Session::Work work = session_.WaitForWork(clock_.Now());
  EXPECT_THAT(work.release, ElementsAre(LeaseId(4)));
  EXPECT_THAT(work.renew, UnorderedElementsAre(LeaseId(3), LeaseId(5)));
  work = session_.WaitForWork(clock_.Now());
  EXPECT_THAT(work.release, IsEmpty());
}

TEST_F(SessionTest, EndNamesItsReasonAndBothEpochs) {
  session_.AddLease(LeaseId(3), clock_.Now() + kLease);
  session_.End(absl::UnavailableError("socket closed"));
  session_.End(absl::CancelledError("later, and of no interest"));
  absl::Status status = session_.CheckLease(LeaseId(3));
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Words(status), HasSubstr("epoch 1234 is over (socket closed)"));
  EXPECT_THAT(Words(status), HasSubstr("not attached again yet"));
  session_.SetNextEpoch(5678);
  status = session_.CheckLease(LeaseId(3));
  EXPECT_THAT(Words(status), HasSubstr("epoch 1234 is over (socket closed)"));
  EXPECT_THAT(Words(status), HasSubstr("attached anew to daemon epoch 5678"));
  session_.ReleaseLease(LeaseId(3));
  EXPECT_THAT(session_.WaitForWork(clock_.Now()).release, IsEmpty()) << "no one to tell";
}

TEST_F(SessionTest, WhoWaitsForWorkIsWokenByAReleaseAndByTheEnd) {
  session_.AddLease(LeaseId(3), clock_.Now() + kLease);
  std::thread keeper([&] {
    EXPECT_THAT(session_.WaitForWork(clock_.Now() + absl::Hours(1)).release,
                ElementsAre(LeaseId(3)));
    (void)session_.WaitForWork(clock_.Now() + absl::Hours(1));
  });
  session_.ReleaseLease(LeaseId(3));
  session_.End(absl::CancelledError("done"));
  keeper.join();
}

}  // namespace
}  // namespace crumb
