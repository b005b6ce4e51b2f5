// SPDX-License-Identifier: Apache-2.0
//
// A publish against a control plane that answers as a test wishes, and real staging memory.
#include <sys/mman.h>

#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "client/session/publisher.h"
#include "proto/base/crc32c.h"
#include "tests/client/sequence/sequence_testing.h"
#include "tests/client/transport/fake_arena.h"
#include "tests/support/test_profile.h"

namespace crumb {
namespace {

using testing::ElementsAre;

// Wants every page that it has not been given: the sink's in BF16, all others in INT2.
class FakeControlPlane : public ControlPlane {
 public:
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
    begun_.push_back(tokens.size() / kPageTokens);
    MissingPages missing{.publish = PublishId(begun_.size()), .int2 = {}, .bf16 = {}};
    for (uint32_t page = committed_pages_; page < begun_.back(); ++page) {
      (page == 0 ? missing.bf16 : missing.int2).emplace_back(page);
    }
    return missing;
  }
  absl::StatusOr<CommitCounts> CommitPublish(const CommitParams& params, absl::Time) override {
    commits_.push_back(params);
    if (commits_.size() <= busy_commits_) {
      return absl::ResourceExhaustedError("the demotion queue is full");
    }
    if (!commit_status_.ok()) {
      return commit_status_;
    }
    const auto added = static_cast<uint32_t>(params.staged.size());
    const CommitCounts counts{added, committed_pages_};
    committed_pages_ += added;
    return counts;
  }
  absl::Status AbortPublish(PublishId publish, absl::Time) override {
    aborted_.push_back(publish.value());
    return absl::OkStatus();
  }

  std::vector<size_t> begun_;  // Pages of each Begin.
  std::vector<CommitParams> commits_;
  std::vector<uint64_t> aborted_;
  absl::Status commit_status_;
  size_t busy_commits_ = 0;  // So many find the queue full.
  uint32_t committed_pages_ = 0;
};

class PublishStepsTest : public testing::Test {
 protected:
  PublishStepsTest() {
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

  absl::StatusOr<PublishResult> Run(size_t max_step_bytes, absl::Time deadline = Soon()) {
    SequenceExporter exporter(*sequence_);
    return Publisher({.max_step_bytes = max_step_bytes, .first_backoff = absl::Milliseconds(1)},
                     session_, exporter, Clock::System())
        .Run("", tokens_, deadline);
  }
  std::vector<std::byte> Export(const StagedImage& staged) const {
    std::vector<std::byte> image(profile_->geometry().PageBytes(staged.encoding));
    EXPECT_TRUE(sequence_->ExportPage(staged.page, staged.encoding, image).ok());
    return image;
  }

  std::shared_ptr<const Profile> profile_ = MakeTestProfile();
  FakeArena arena_{profile_};
  std::unique_ptr<Sequence> sequence_ =
      *Sequence::Create({.profile = profile_, .num_query_heads = 2});
  std::vector<uint32_t> tokens_ = std::vector<uint32_t>(512, 3);
  std::shared_ptr<FakeControlPlane> control_ = std::make_shared<FakeControlPlane>();
  std::shared_ptr<Session> session_;
};

TEST_F(PublishStepsTest, StagedBytesAreTheSequencesAndChecksummedByHead) {
  const auto result = Run(size_t{1} << 30);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->pages_added, 8u);
  ASSERT_EQ(control_->commits_.size(), 1u);
  const UniqueFd memfd = arena_.TakeStaging();
  for (const StagedImage& staged : control_->commits_[0].staged) {
    const std::vector<std::byte> expected = Export(staged);
    std::vector<std::byte> found(expected.size());
    ASSERT_EQ(::pread(memfd.get(), found.data(), found.size(), static_cast<off_t>(staged.offset)),
              static_cast<ssize_t>(found.size()));
    EXPECT_EQ(found, expected);
    const std::span<const std::byte> image(found);
    EXPECT_THAT(staged.head_crc32c, ElementsAre(Crc32c(image.first(image.size() / 2)),
                                                Crc32c(image.subspan(image.size() / 2))));
  }
  EXPECT_TRUE(control_->aborted_.empty());
}

TEST_F(PublishStepsTest, WhatDoesNotFitIntoOneStepGoesPrefixByPrefix) {
  // The sink in BF16 takes 32 KiB, an INT2 page 6 KiB, the window's pages 32 KiB again.
  const auto result = Run(48 << 10);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->pages_added, 8u);
  EXPECT_EQ(control_->committed_pages_, 8u);
  EXPECT_GT(control_->commits_.size(), 1u);
  uint32_t next = 0;
  for (const CommitParams& commit : control_->commits_) {
    for (const StagedImage& staged : commit.staged) {
      EXPECT_EQ(staged.page.value(), next++) << "each page once, in order";
    }
  }
  EXPECT_EQ(control_->begun_.size(), control_->commits_.size() + control_->aborted_.size())
      << "every publish that was begun was ended";
  EXPECT_THAT(control_->aborted_, ElementsAre(1u)) << "the whole is asked for once";
}

TEST_F(PublishStepsTest, StepOfOnePageIsTakenHoweverLargeThePage) {
  const auto result = Run(1);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(control_->commits_.size(), 8u);
}

TEST_F(PublishStepsTest, FailedCommitIsAbortedAndItsStagingReused) {
  control_->commit_status_ = absl::DataLossError("page 3: another checksum");
  EXPECT_EQ(Run(size_t{1} << 30).status(), control_->commit_status_);
  EXPECT_THAT(control_->aborted_, ElementsAre(1u));
  control_->commit_status_ = absl::OkStatus();
  EXPECT_TRUE(Run(size_t{1} << 30).ok());
  EXPECT_EQ(arena_.num_requests(), 1) << "the answer says that the daemon is done with it";
}

TEST_F(PublishStepsTest, CommitThatFindsTheQueueFullIsRepeatedAlone) {
  control_->busy_commits_ = 3;
  const auto result = Run(size_t{1} << 30);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->pages_added, 8u);
  EXPECT_THAT(control_->begun_, ElementsAre(8u)) << "begun once";
  ASSERT_EQ(control_->commits_.size(), 4u);
  EXPECT_EQ(control_->commits_[0].publish, control_->commits_[3].publish);
  EXPECT_EQ(control_->commits_[3].staged.size(), 8u);
  EXPECT_TRUE(control_->aborted_.empty());
}

TEST_F(PublishStepsTest, QueueThatStaysFullIsToldAtTheDeadlineAndThePublishAborted) {
  control_->busy_commits_ = SIZE_MAX;
  const absl::Status status =
      Run(size_t{1} << 30, Clock::System().Now() + absl::Milliseconds(50)).status();
  EXPECT_EQ(status, absl::ResourceExhaustedError("the demotion queue is full"));
  EXPECT_GE(control_->commits_.size(), 2u);
  EXPECT_THAT(control_->aborted_, ElementsAre(1u));
}

TEST_F(PublishStepsTest, StagingIsNotWrittenAgainAfterACommitWithoutAnAnswer) {
  control_->commit_status_ = absl::DeadlineExceededError("no answer");
  EXPECT_FALSE(Run(size_t{1} << 30).ok());
  control_->commit_status_ = absl::OkStatus();
  EXPECT_TRUE(Run(size_t{1} << 30).ok());
  EXPECT_EQ(arena_.num_requests(), 2) << "another memfd: the daemon may still read the first";
}

}  // namespace
}  // namespace crumb
