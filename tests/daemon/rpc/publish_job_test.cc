// SPDX-License-Identifier: Apache-2.0
//
// Publishes in BF16 through the pool, on a fake device with a fake tier: what becomes readable
// where, and what is counted.
#include "daemon/rpc/publish_job.h"

#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "gtest/gtest.h"

#include "crumb/cuda/demote.h"
#include "proto/base/bfloat16.h"
#include "proto/base/crc32c.h"
#include "proto/page/chunk_layout.h"
#include "tests/support/exposition.h"
#include "tests/support/fake_clock.h"
#include "tests/support/fake_demoter.h"
#include "tests/support/test_profile.h"

namespace crumb {
namespace {

constexpr uint32_t kNumPages = 5;  // The sink, two pages of history, two of the tail.

class PublishJobTest : public testing::Test {
 protected:
  PublishJobTest() {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < kNumPages * page_bytes_ / sizeof(BFloat16); ++i) {
      const BFloat16 value = BFloat16::FromFloat(normal(random));
      const auto* bytes = reinterpret_cast<const std::byte*>(&value);
      rows_.insert(rows_.end(), bytes, bytes + sizeof(value));
    }
    session_ = *sessions_.Attach({.client_name = "engine",
                                  .pid = 1,
                                  .tenant = "default",
                                  .profile_id = profile_->id(),
                                  .heads = {}},
                                 profile_);
  }

  std::span<const std::byte> Rows(uint32_t page) const {
    return std::span(rows_).subspan(page * page_bytes_, page_bytes_);
  }
  std::vector<uint32_t> Prompt(uint32_t extra) const {
    return std::vector<uint32_t>(size_t{kNumPages} * kPageTokens + extra, 3);
  }
  // Stages all pages in BF16 and waits for the commit.
  absl::StatusOr<CommitResult> Publish(SessionId session) {
    const auto plan = store_->BeginPublish(session, "", Prompt(0));
    EXPECT_TRUE(plan.ok()) << plan.status();
    std::vector<StagedPage> staged;
    for (uint32_t page = 0; page < kNumPages; ++page) {
      staged.push_back({PageIdx(page), StagedEncoding::kBf16, page * page_bytes_, {}});
      const size_t head_bytes = page_bytes_ / profile_->geometry().num_kv_heads;
      for (uint32_t head = 0; head < profile_->geometry().num_kv_heads; ++head) {
        staged.back().head_crc32c.push_back(
            Crc32c(Rows(page).subspan(head * head_bytes, head_bytes)));
      }
    }
    absl::Notification done;
    absl::StatusOr<CommitResult> result;
    auto job = PublishJob::Create(
        context_,
        {session_, plan->id, std::move(staged),
         std::make_shared<const StagingMemory>(std::span<const std::byte>(rows_), [] {})},
        [&](const absl::StatusOr<CommitResult>& answer) {
          result = answer;
          done.Notify();
        });
    EXPECT_TRUE(job.ok()) << job.status();
    EXPECT_TRUE(pool_.Submit(*std::move(job)).ok());
    done.WaitForNotification();
    return result;
  }
  std::vector<std::byte> Int2OnHost(SessionId session, const LookupResult& found, uint32_t page) {
    const PageKey key{PageIdx(page), PageEncoding::kInt2};
    const auto guard = store_->BeginRead(session, found.lease, {{key}});
    EXPECT_TRUE(guard.ok()) << guard.status();
    const auto bytes = guard->pages()[0].bytes;
    return {bytes.begin(), bytes.end()};
  }
  std::vector<std::byte> Demoted(uint32_t page) const {
    const Geometry& geometry = profile_->geometry();
    std::vector<std::byte> int2(geometry.PageBytes(PageEncoding::kInt2));
    EXPECT_TRUE(
        DemotePage(*profile_, {0, geometry.num_kv_heads}, page * kPageTokens, Rows(page), int2)
            .ok());
    return int2;
  }
  SessionId Reader() {
    return *store_->OpenSession(
        {.client_name = "reader",
         .pid = 2,
         .tenant = "default",
         .profile = {profile_->id(), profile_->geometry(), profile_->windows()},
         .heads = {},
         .reads_copies = true});
  }
  std::string Metric(const std::string& series) const {
    return SampleOf(metrics_.Text(), series).value_or("none");
  }
  std::string PagesBy(const std::string& by) const {
    return Metric("crumb_write_page_seconds_count{by=\"" + by + "\"}");
  }

  const std::shared_ptr<const Profile> profile_ = MakeTestProfile();
  const size_t page_bytes_ = profile_->geometry().PageBytes(PageEncoding::kBf16);
  std::vector<std::byte> rows_;
  FakeClock clock_;
  FakeCopyTier tier_{size_t{1} << 20, 4};
  FakeDemoter demoter_{&tier_};
  std::unique_ptr<PageStore> store_ = *PageStore::Create({}, clock_, &tier_);
  SessionTable table_;
  SessionRegistry sessions_{*store_, table_, nullptr};
  ProfileRegistry profiles_;
  Metrics metrics_{*store_, table_, "test"};
  DemotePool pool_{{.num_threads = 3, .max_jobs = 4}};
  RpcContext context_{.store = *store_,
                      .session_table = table_,
                      .sessions = sessions_,
                      .profiles = profiles_,
                      .pool = pool_,
                      .metrics = metrics_,
                      .clock = clock_,
                      .demoter = &demoter_,
                      .memory_socket = {},
                      .data_planes = {},
                      .version = "test",
                      .start_time = clock_.Now()};
  std::shared_ptr<const AttachedEngine> session_;
};

TEST_F(PublishJobTest, PagesDemotedByTheDeviceAreReadableInBothPlacesAtOnce) {
  const auto result = Publish(session_->id);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->pages_added, kNumPages);
  const SessionId reader = Reader();
  const auto found = store_->Lookup(reader, "", Prompt(1), false);
  ASSERT_TRUE(found.ok()) << found.status();
  ASSERT_EQ(found->pages.size(), kNumPages);
  for (uint32_t page = 1; page < kNumPages; ++page) {
    ASSERT_TRUE(found->pages[page].int2_copy.has_value()) << "page " << page;
    EXPECT_EQ(Int2OnHost(reader, *found, page), Demoted(page)) << "page " << page;
  }
  EXPECT_FALSE(found->pages[0].bf16_copy.has_value()) << "that is the promoter's";
  const auto chunk = store_->GetCopyChunk(reader, found->pages[3].int2_copy->chunk);
  ASSERT_TRUE(chunk.ok()) << chunk.status();
  const Geometry& geometry = profile_->geometry();
  const ChunkLayout layout{geometry.PageBytes(PageEncoding::kInt2), chunk->num_blocks};
  std::vector<std::byte> copy(layout.image_bytes);
  ASSERT_EQ(static_cast<ssize_t>(copy.size()),
            ::pread(chunk->memory.get(), copy.data(), copy.size(),
                    static_cast<off_t>(found->pages[3].int2_copy->block * layout.block_stride())));
  EXPECT_EQ(copy, Demoted(3));
  EXPECT_EQ(PagesBy("gpu_demotion"), "4");
  EXPECT_EQ(PagesBy("cpu_demotion"), "0");
  EXPECT_EQ(PagesBy("copy"), "1");
  EXPECT_TRUE(store_->CheckInvariants().ok()) << store_->CheckInvariants();
}

TEST_F(PublishJobTest, DeviceThatFailsLeavesThePagesToTheCpuAndTheCopiesToThePromoter) {
  demoter_.fails_to_finish = absl::InternalError("the device is gone");
  const auto result = Publish(session_->id);
  ASSERT_TRUE(result.ok()) << result.status();
  const SessionId reader = Reader();
  const auto found = store_->Lookup(reader, "", Prompt(1), false);
  ASSERT_TRUE(found.ok()) << found.status();
  for (uint32_t page = 1; page < kNumPages; ++page) {
    EXPECT_FALSE(found->pages[page].int2_copy.has_value()) << "page " << page;
    EXPECT_EQ(Int2OnHost(reader, *found, page), Demoted(page)) << "page " << page;
  }
  EXPECT_EQ(PagesBy("gpu_demotion"), "0");
  EXPECT_EQ(PagesBy("cpu_demotion"), "4");
  EXPECT_EQ(Metric("crumb_gpu_demotion_failures_total"), "4");
  EXPECT_TRUE(store_->CheckInvariants().ok()) << store_->CheckInvariants();
  CopyAll(store_.get(), &tier_);
  const auto later = store_->Lookup(reader, "", Prompt(1), false);
  EXPECT_TRUE(later->pages[3].int2_copy.has_value());
}

TEST_F(PublishJobTest, WithoutADeviceTheCpuDemotes) {
  context_.demoter = nullptr;
  ASSERT_TRUE(Publish(session_->id).ok());
  EXPECT_EQ(PagesBy("cpu_demotion"), "4");
  EXPECT_EQ(Metric("crumb_gpu_demotion_failures_total"), "0");
}

TEST_F(PublishJobTest, RefusedPublishKeepsItsPlacesUntilItIsAborted) {
  const uint16_t nan = 0x7fc0;
  std::memcpy(&rows_[2 * page_bytes_], &nan, sizeof(nan));
  const auto result = Publish(session_->id);
  EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument) << result.status();
  EXPECT_TRUE(store_->CheckInvariants().ok()) << store_->CheckInvariants();
  sessions_.Detach(session_->id);
  EXPECT_EQ(store_->Status().copies, 0u);
  EXPECT_EQ(store_->Status().copy_used_bytes, 0u);
  EXPECT_EQ(Metric("crumb_gpu_demotion_failures_total"), "0");
}

}  // namespace
}  // namespace crumb
