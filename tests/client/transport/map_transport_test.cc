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

ListedChunk Listed(ChunkId id, PageEncoding encoding) {
  return {id.value(), static_cast<uint32_t>(encoding)};
}

TEST_F(MapTransportTest, ListedChunksAreMappedAheadSoThatOpenAsksForNothing) {
  const ChunkId int2 = arena_.AddChunk(PageEncoding::kInt2, 4);
  const ChunkId bf16 = arena_.AddChunk(PageEncoding::kBf16, 1);
  arena_.SetListed({Listed(bf16, PageEncoding::kBf16), Listed(int2, PageEncoding::kInt2)});
  transport_->MapAhead(In(absl::Seconds(10)));
  EXPECT_EQ(transport_->num_mapped_chunks(), 2u);
  const int before = arena_.num_requests();
  for (const ChunkId id : {int2, bf16}) {
    const auto source = transport_->Open(arena_.PrefixIn(id), In(absl::Seconds(10)));
    ASSERT_TRUE(source.ok()) << source.status();
    EXPECT_TRUE((*source)->Validate().ok()) << (*source)->Validate();
  }
  EXPECT_EQ(arena_.num_requests(), before);
}

TEST_F(MapTransportTest, MoreChunksThanAReplyHoldsAreAskedForInTurns) {
  std::vector<ListedChunk> listed;
  for (uint32_t i = 0; i < 2 * kMaxListedChunks + 3; ++i) {
    listed.insert(listed.begin(),
                  Listed(arena_.AddChunk(PageEncoding::kInt2, 1), PageEncoding::kInt2));
  }
  arena_.SetListed(listed);
  transport_->MapAhead(In(absl::Seconds(10)));
  EXPECT_EQ(transport_->num_mapped_chunks(), listed.size());
}

TEST_F(MapTransportTest, ChunkThatCannotBeMappedAheadIsTheLookupsToReport) {
  const ChunkId int2 = arena_.AddChunk(PageEncoding::kInt2, 4);
  arena_.SetListed({Listed(ChunkId(99), PageEncoding::kInt2), Listed(int2, PageEncoding::kInt2)});
  transport_->MapAhead(In(absl::Seconds(10)));
  EXPECT_TRUE(transport_->Open(arena_.PrefixIn(int2), In(absl::Seconds(10))).ok());
  arena_.SetListed({{int2.value(), 7}});  // No encoding that this library knows.
  transport_->MapAhead(In(absl::Seconds(10)));
  arena_.SetStatus(absl::InvalidArgumentError("operation 4: the memory socket knows 1, 2 and 3"));
  transport_->MapAhead(In(absl::Seconds(10)));
  arena_.SetStatus(absl::OkStatus());
  EXPECT_TRUE(transport_->Open(arena_.PrefixIn(int2), In(absl::Seconds(10))).ok());
}

TEST_F(MapTransportTest, IdleChunksStayAsLongAsTheDaemonHasThem) {
  FakeClock clock;
  const ChunkId kept = arena_.AddChunk(PageEncoding::kInt2, 4);
  const ChunkId given_up = arena_.AddChunk(PageEncoding::kInt2, 4);
  arena_.SetListed({Listed(given_up, PageEncoding::kInt2), Listed(kept, PageEncoding::kInt2)});
  auto transport =
      *MapTransport::Connect({}, arena_.session(), clock.Now() + absl::Hours(1), clock);
  transport->Maintain();
  EXPECT_EQ(transport->num_mapped_chunks(), 2u);
  clock.Advance(ChunkCache<MappedChunk>::kMaxIdle);
  transport->Maintain();
  EXPECT_EQ(transport->num_mapped_chunks(), 2u);
  arena_.SetListed({Listed(kept, PageEncoding::kInt2)});
  clock.Advance(ChunkCache<MappedChunk>::kMaxIdle);
  transport->Maintain();
  EXPECT_EQ(transport->num_mapped_chunks(), 1u);
}

}  // namespace
}  // namespace crumb
