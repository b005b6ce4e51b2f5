// SPDX-License-Identifier: Apache-2.0
//
// A publish against a control plane that answers as a test wishes, and real staging memory.
#include <sys/mman.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "client/session/publisher.h"
#include "proto/base/crc32c.h"
#include "tests/client/sequence/sequence_testing.h"
#include "tests/client/transport/fake_arena.h"
#include "tests/support/test_profile.h"

namespace crumb {
namespace {

using testing::Each;
using testing::ElementsAre;
using testing::SizeIs;

// Lacks every page that it has not been given: the sink's in BF16, all others in INT2. A thread of
// its own reads the parts that are to be written and answers, once `gate` lets it.
class FakeControlPlane : public ControlPlane {
 public:
  explicit FakeControlPlane(FakeArena* arena)
      : arena_(*arena), thread_([this] { AnswerWrites(); }) {}
  ~FakeControlPlane() override {
    {
      absl::MutexLock lock(&mutex_);
      is_over_ = true;
    }
    thread_.join();
  }
  FakeControlPlane(const FakeControlPlane&) = delete;
  FakeControlPlane& operator=(const FakeControlPlane&) = delete;

  absl::StatusOr<AttachedSession> Attach(const AttachParams&) override {
    return absl::UnimplementedError("not needed");
  }
  absl::Status WaitForNews() override { return absl::UnimplementedError("not needed"); }
  void Cancel() override {}
  absl::StatusOr<FoundPrefix> Lookup(const LookupParams&, absl::Time) override {
    return absl::UnimplementedError("not needed");
  }
  absl::StatusOr<RenewedLeases> RenewLeases(std::span<const LeaseId>, absl::Time) override {
    return absl::UnimplementedError("not needed");
  }
  absl::Status ReleaseLeases(std::span<const LeaseId>, absl::Time) override {
    return absl::OkStatus();
  }

  absl::StatusOr<MissingPages> BeginPublish(const std::string&,
                                            std::span<const uint32_t> tokens,
                                            absl::Time) override {
    ++num_begun_;
    MissingPages missing{.publish = PublishId(num_begun_), .int2 = {}, .bf16 = {}};
    for (uint32_t page = 0; page < tokens.size() / kPageTokens; ++page) {
      (page == 0 ? missing.bf16 : missing.int2).emplace_back(page);
    }
    return missing;
  }
  void StartWrite(const CommitParams& params,
                  absl::Time,
                  std::function<void(const absl::Status&)> done) override {
    UniqueFd memfd = arena_.TakeStaging();  // Of the first write after it was given.
    absl::MutexLock lock(&mutex_);
    if (memfd.is_valid()) {
      memfd_ = std::move(memfd);
    }
    writes_.push_back({params, std::move(done)});
    most_waiting_ = std::max(most_waiting_, writes_.size());
    ++num_writes_;
  }
  absl::StatusOr<CommitCounts> CommitPublish(const CommitParams& params, absl::Time) override {
    commits_.push_back(params);
    if (commits_.size() <= busy_commits_) {
      return absl::ResourceExhaustedError("the demotion queue is full");
    }
    if (!commit_status_.ok()) {
      return commit_status_;
    }
    return CommitCounts{8, 0};
  }
  absl::Status AbortPublish(PublishId publish, absl::Time) override {
    absl::MutexLock lock(&mutex_);
    EXPECT_TRUE(writes_.empty()) << "the publish is aborted when the daemon is done with its parts";
    aborted_.push_back(publish.value());
    return absl::OkStatus();
  }

  // Answers `more` writes, and then waits.
  void Let(size_t more) {
    absl::MutexLock lock(&mutex_);
    gate_ = more;
  }
  void WaitForWrites(size_t count) {
    absl::MutexLock lock(&mutex_);
    const auto has_them = [this, count] { return num_writes_ >= count; };
    mutex_.Await(absl::Condition(&has_them));
  }
  size_t num_writes() {
    absl::MutexLock lock(&mutex_);
    return num_writes_;
  }

  // What the answers to writes are, from the first on; OK after the last.
  std::deque<absl::Status> write_statuses_;
  absl::Status commit_status_;
  size_t busy_commits_ = 0;  // So many find the queue full.

  size_t num_begun_ = 0;
  std::vector<CommitParams> commits_;
  std::vector<uint64_t> aborted_;
  size_t most_waiting_ = 0;  // Writes without an answer.
  // Of the writes that were answered OK, in order.
  std::vector<CommitParams> written_;
  std::map<uint32_t, std::vector<std::byte>> bytes_;  // [page]

 private:
  struct Write {
    CommitParams params;
    std::function<void(const absl::Status&)> done;
  };

  void AnswerWrites() {
    absl::MutexLock lock(&mutex_);
    const auto has_work = [this] { return is_over_ || (gate_ > 0 && !writes_.empty()); };
    while (true) {
      mutex_.Await(absl::Condition(&has_work));
      if (is_over_) {
        return;
      }
      --gate_;
      Write write = std::move(writes_.front());
      writes_.pop_front();
      absl::Status status;
      if (!write_statuses_.empty()) {
        status = write_statuses_.front();
        write_statuses_.pop_front();
      }
      if (status.ok()) {
        Read(write.params);
      }
      mutex_.Unlock();
      write.done(status);
      mutex_.Lock();
    }
  }
  void Read(const CommitParams& params) {
    for (const StagedImage& image : params.staged) {
      const size_t size = profile_->geometry().PageBytes(image.encoding);
      std::vector<std::byte>& bytes = bytes_[image.page.value()];
      EXPECT_TRUE(bytes.empty()) << "page " << image.page.value() << " is written twice";
      bytes.resize(size);
      EXPECT_EQ(::pread(memfd_.get(), bytes.data(), size, static_cast<off_t>(image.offset)),
                static_cast<ssize_t>(size));
    }
    written_.push_back(params);
  }

  FakeArena& arena_;
  const std::shared_ptr<const Profile> profile_ = MakeTestProfile();
  absl::Mutex mutex_;
  size_t gate_ = SIZE_MAX;
  bool is_over_ = false;
  size_t num_writes_ = 0;
  std::deque<Write> writes_;
  UniqueFd memfd_;
  std::thread thread_;
};

class PublishPartsTest : public testing::Test {
 protected:
  PublishPartsTest() {
    const Activations activations(*profile_, 2, 512, /*seed=*/1);
    while (sequence_->length() < 512) {
      EXPECT_TRUE(RunChunk(sequence_.get(), activations, 64).ok());
    }
    AttachedSession attached;
    attached.info = arena_.session();
    attached.lease = absl::Seconds(30);
    DataPlanes planes{.in_use = DataPlane::kMap,
                      .map = *MapTransport::Connect({}, attached.info, Soon()),
                      .ucx = nullptr,
                      .note = ""};
    session_ = std::make_shared<Session>(control_, std::move(attached), std::move(planes),
                                         Clock::System());
  }
  static absl::Time Soon() { return Clock::System().Now() + absl::Seconds(10); }

  // 1: a part is as large as a BF16 page, and so as the five INT2 pages together.
  absl::StatusOr<PublishResult> Run(size_t max_part_bytes,
                                    size_t num_slots = 3,
                                    absl::Time deadline = Soon()) {
    SequenceExporter exporter(*sequence_);
    return Publisher({.max_part_bytes = max_part_bytes,
                      .writes = {.num_slots = num_slots, .first_backoff = absl::Milliseconds(1)}},
                     session_, exporter, Clock::System())
        .Run("", tokens_, deadline);
  }
  std::vector<std::byte> Export(PageIdx page, PageEncoding encoding) const {
    std::vector<std::byte> image(profile_->geometry().PageBytes(encoding));
    EXPECT_TRUE(sequence_->ExportPage(page, encoding, image).ok());
    return image;
  }
  void ExpectChecksummedByHead(const StagedImage& staged, std::span<const std::byte> image) const {
    EXPECT_THAT(staged.head_crc32c, ElementsAre(Crc32c(image.first(image.size() / 2)),
                                                Crc32c(image.subspan(image.size() / 2))));
  }

  std::shared_ptr<const Profile> profile_ = MakeTestProfile();
  FakeArena arena_{profile_};
  std::unique_ptr<Sequence> sequence_ =
      *Sequence::Create({.profile = profile_, .num_query_heads = 2});
  std::vector<uint32_t> tokens_ = std::vector<uint32_t>(512, 3);
  std::shared_ptr<FakeControlPlane> control_ = std::make_shared<FakeControlPlane>(&arena_);
  std::shared_ptr<Session> session_;
};

constexpr size_t kAllAtOnce = size_t{1} << 30;

TEST_F(PublishPartsTest, WhatFitsIntoOnePartIsStagedAndCommittedInOneCall) {
  const auto result = Run(kAllAtOnce);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->pages_added, 8u);
  EXPECT_EQ(control_->num_writes(), 0u);
  ASSERT_EQ(control_->commits_.size(), 1u);
  EXPECT_THAT(control_->commits_[0].staged, SizeIs(8));
  const UniqueFd memfd = arena_.TakeStaging();
  for (const StagedImage& staged : control_->commits_[0].staged) {
    const std::vector<std::byte> expected = Export(staged.page, staged.encoding);
    std::vector<std::byte> found(expected.size());
    ASSERT_EQ(::pread(memfd.get(), found.data(), found.size(), static_cast<off_t>(staged.offset)),
              static_cast<ssize_t>(found.size()));
    EXPECT_EQ(found, expected);
    ExpectChecksummedByHead(staged, found);
  }
  EXPECT_TRUE(control_->aborted_.empty());
}

TEST_F(PublishPartsTest, PartsAreTheSequencesBytesInStagingMemoryOfAFewOfThem) {
  // Three pages go in BF16: the sink's and the window's.
  const auto result = Run(1, /*num_slots=*/2);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->pages_added, 8u);
  EXPECT_EQ(control_->num_begun_, 1u);
  ASSERT_THAT(control_->written_, SizeIs(4));
  for (size_t part = 0; part < 4; ++part) {
    const bool is_last = part == 3;
    ASSERT_THAT(control_->written_[part].staged, SizeIs(is_last ? 5 : 1));
    for (const StagedImage& staged : control_->written_[part].staged) {
      EXPECT_EQ(staged.encoding == PageEncoding::kInt2, is_last) << "what is demoted comes first";
      const std::vector<std::byte>& found = control_->bytes_[staged.page.value()];
      EXPECT_EQ(found, Export(staged.page, staged.encoding));
      ExpectChecksummedByHead(staged, found);
    }
  }
  EXPECT_THAT(control_->bytes_, SizeIs(8));
  EXPECT_THAT(control_->commits_, ElementsAre(testing::Field(&CommitParams::staged, SizeIs(0))));
  EXPECT_LE(control_->most_waiting_, 2u);
  EXPECT_EQ(arena_.num_requests(), 1);
  EXPECT_EQ(arena_.staging_bytes(), size_t{1} << 20) << "its least, and room for two parts";
}

TEST_F(PublishPartsTest, PagesOfAPartAscendThoughBf16ComesFirst) {
  const auto result = Run(size_t{50} << 10);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_GT(control_->written_.size(), 1u);
  for (const CommitParams& part : control_->written_) {
    for (size_t i = 1; i < part.staged.size(); ++i) {
      EXPECT_LT(part.staged[i - 1].page, part.staged[i].page);
    }
  }
  EXPECT_THAT(control_->bytes_, SizeIs(8));
}

TEST_F(PublishPartsTest, PartsAreStagedWhileEarlierOnesAreWrittenAndThenWaitForTheirSlots) {
  control_->Let(0);
  absl::StatusOr<PublishResult> result;
  std::thread publish([&] { result = Run(1, /*num_slots=*/3); });
  control_->WaitForWrites(3);
  control_->Let(1);
  control_->WaitForWrites(4);
  EXPECT_EQ(control_->num_writes(), 4u) << "the last has the slot of the first";
  control_->Let(SIZE_MAX);
  publish.join();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_THAT(control_->bytes_, SizeIs(8));
}

TEST_F(PublishPartsTest, PartThatFailsWhileTheNextAreStagedEndsThePublish) {
  control_->Let(0);
  control_->write_statuses_ = {absl::OkStatus(), absl::DataLossError("page 3: another checksum")};
  absl::StatusOr<PublishResult> result;
  absl::Notification returned;
  std::thread publish([&] {
    result = Run(1, /*num_slots=*/3);
    returned.Notify();
  });
  control_->WaitForWrites(3);
  control_->Let(2);
  // The third has no answer, so the daemon may be reading its slot.
  EXPECT_FALSE(returned.WaitForNotificationWithTimeout(absl::Milliseconds(50)));
  control_->Let(SIZE_MAX);
  publish.join();
  EXPECT_EQ(result.status(), absl::DataLossError("page 3: another checksum"));
  EXPECT_TRUE(control_->commits_.empty());
  EXPECT_THAT(control_->aborted_, ElementsAre(1u));

  control_->bytes_.clear();
  EXPECT_TRUE(Run(1).ok());
  EXPECT_EQ(arena_.num_requests(), 1) << "the answers say that the daemon is done with it";
}

TEST_F(PublishPartsTest, StagingIsNotWrittenAgainAfterAPartWithoutAnAnswer) {
  control_->write_statuses_ = {absl::OkStatus(), absl::DeadlineExceededError("no answer")};
  EXPECT_TRUE(absl::IsDeadlineExceeded(Run(1).status()));
  EXPECT_THAT(control_->aborted_, ElementsAre(1u));
  control_->bytes_.clear();
  EXPECT_TRUE(Run(1).ok());
  EXPECT_EQ(arena_.num_requests(), 2) << "another memfd: the daemon may still read the first";
}

TEST_F(PublishPartsTest, PartThatFindsTheQueueFullIsRepeatedAlone) {
  const absl::Status full = absl::ResourceExhaustedError("the demotion queue is full");
  control_->write_statuses_ = {absl::OkStatus(), full, absl::OkStatus(), full, full};
  const auto result = Run(1);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(control_->num_writes(), 7u);
  EXPECT_THAT(control_->bytes_, SizeIs(8)) << "each was written, and once";
  EXPECT_EQ(control_->num_begun_, 1u);
  EXPECT_TRUE(control_->aborted_.empty());
}

TEST_F(PublishPartsTest, QueueThatStaysFullForPartsIsToldAtTheDeadline) {
  const absl::Status full = absl::ResourceExhaustedError("the demotion queue is full");
  control_->write_statuses_ = std::deque<absl::Status>(1000, full);
  EXPECT_EQ(Run(1, 3, Clock::System().Now() + absl::Milliseconds(50)).status(), full);
  EXPECT_GE(control_->num_writes(), 2u);
  EXPECT_THAT(control_->aborted_, ElementsAre(1u));
}

TEST_F(PublishPartsTest, FailedCommitIsAbortedAndItsStagingReused) {
  control_->commit_status_ = absl::DataLossError("page 3: another checksum");
  for (const size_t max_part_bytes : {kAllAtOnce, size_t{1}}) {
    EXPECT_EQ(Run(max_part_bytes).status(), control_->commit_status_);
    control_->bytes_.clear();
  }
  EXPECT_THAT(control_->aborted_, ElementsAre(1u, 2u));
  control_->commit_status_ = absl::OkStatus();
  EXPECT_TRUE(Run(kAllAtOnce).ok());
  EXPECT_EQ(arena_.num_requests(), 1) << "the answer says that the daemon is done with it";
}

TEST_F(PublishPartsTest, CommitThatFindsTheQueueFullIsRepeatedAlone) {
  control_->busy_commits_ = 3;
  const auto result = Run(kAllAtOnce);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(control_->num_begun_, 1u);
  ASSERT_EQ(control_->commits_.size(), 4u);
  EXPECT_EQ(control_->commits_[0].publish, control_->commits_[3].publish);
  EXPECT_THAT(control_->commits_[3].staged, SizeIs(8));
  EXPECT_TRUE(control_->aborted_.empty());
}

TEST_F(PublishPartsTest, QueueThatStaysFullIsToldAtTheDeadlineAndThePublishAborted) {
  control_->busy_commits_ = SIZE_MAX;
  const absl::Status status =
      Run(kAllAtOnce, 3, Clock::System().Now() + absl::Milliseconds(50)).status();
  EXPECT_EQ(status, absl::ResourceExhaustedError("the demotion queue is full"));
  EXPECT_GE(control_->commits_.size(), 2u);
  EXPECT_THAT(control_->aborted_, ElementsAre(1u));
}

TEST_F(PublishPartsTest, StagingIsNotWrittenAgainAfterACommitWithoutAnAnswer) {
  control_->commit_status_ = absl::DeadlineExceededError("no answer");
  EXPECT_FALSE(Run(kAllAtOnce).ok());
  control_->commit_status_ = absl::OkStatus();
  EXPECT_TRUE(Run(kAllAtOnce).ok());
  EXPECT_EQ(arena_.num_requests(), 2) << "another memfd: the daemon may still read the first";
}

}  // namespace
}  // namespace crumb
