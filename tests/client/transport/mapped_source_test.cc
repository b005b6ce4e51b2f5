// SPDX-License-Identifier: Apache-2.0
#include "client/transport/mapped_source.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "client/transport/map_transport.h"
#include "tests/client/transport/fake_arena.h"
#include "tests/support/fake_clock.h"
#include "tests/support/test_profile.h"

namespace crumb {
namespace {

using testing::HasSubstr;

class MappedSourceTest : public testing::Test {
 protected:
  static absl::Time Soon() { return Clock::System().Now() + absl::Seconds(10); }

  std::unique_ptr<MapTransport> Transport(bool verify = true, HeadRange heads = {}) {
    SessionInfo session = arena_.session();
    session.heads = heads.Resolve(profile_->geometry().num_kv_heads);
    auto transport = MapTransport::Connect({.verify_pages = verify}, session, Soon());
    EXPECT_TRUE(transport.ok()) << transport.status();
    return *std::move(transport);
  }
  // What Open says to a header that `spoil` has changed.
  template <typename Spoil>
  absl::Status OpenAfter(const Spoil& spoil) {
    spoil(arena_.header(int2_, 2));
    return transport_->Open(arena_.PrefixIn(int2_), Soon()).status();
  }
  // Whose bytes another process could only have changed behind its own generation's back.
  void Corrupt(ChunkId chunk, uint32_t block, size_t byte) {
    arena_.image(chunk, block)[byte] ^= std::byte{1};
  }

  std::shared_ptr<const Profile> profile_ = MakeTestProfile();
  FakeArena arena_{profile_};
  ChunkId int2_ = arena_.AddChunk(PageEncoding::kInt2, 4);
  std::unique_ptr<MapTransport> transport_ = Transport();
};

TEST_F(MappedSourceTest, ReadsTheDaemonsBytesInPlace) {
  const ChunkId bf16 = arena_.AddChunk(PageEncoding::kBf16, 4);
  LeasedPrefix prefix = arena_.PrefixIn(int2_);
  prefix.pages[3].bf16 = arena_.PrefixIn(bf16).pages[3].bf16;
  const auto source = transport_->Open(prefix, Soon());
  ASSERT_TRUE(source.ok()) << source.status();
  ASSERT_TRUE((*source)->WaitForLayer(0).ok());
  const Geometry& geometry = profile_->geometry();
  for (uint32_t page = 0; page < 4; ++page) {
    for (uint32_t layer = 0; layer < geometry.num_layers; ++layer) {
      for (uint32_t head = 0; head < geometry.num_kv_heads; ++head) {
        const std::byte* block =
            (*source)->HeadBlock(PageIdx(page), PageEncoding::kInt2, layer, head);
        ASSERT_NE(block, nullptr);
        EXPECT_EQ(reinterpret_cast<uintptr_t>(block) % 16, 0u);
        EXPECT_TRUE(std::equal(block, block + geometry.HeadBlockBytes(PageEncoding::kInt2),
                               arena_.image(int2_, page).data() +
                                   geometry.HeadBlockOffset(PageEncoding::kInt2, layer, head)));
      }
    }
  }
  EXPECT_EQ((*source)->HeadBlock(PageIdx(2), PageEncoding::kBf16, 0, 0), nullptr);
  EXPECT_NE((*source)->HeadBlock(PageIdx(3), PageEncoding::kBf16, 0, 0), nullptr);
  EXPECT_EQ((*source)->copied_bytes(), 0u);
  EXPECT_TRUE((*source)->Validate().ok());
}

TEST_F(MappedSourceTest, AChunkIsAskedForOnceHoweverManyPrefixesLieInIt) {
  for (int i = 0; i < 10; ++i) {
    ASSERT_TRUE(transport_->Open(arena_.PrefixIn(int2_), Soon()).ok());
  }
  EXPECT_EQ(arena_.num_requests(), 1);
}

TEST_F(MappedSourceTest, HeadersThatAreNotWhatTheLeaseNamedAreRefusedByField) {
  const auto expect = [](const absl::Status& status, const char* text) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
    EXPECT_THAT(std::string(status.message()), HasSubstr("page 2"));
  };
  const PageHeader good = arena_.header(int2_, 2);
  expect(OpenAfter([](PageHeader& header) { header.generation = 4; }), "generation is 4");
  expect(OpenAfter([&](PageHeader& header) { header = good, header.profile_id[0] ^= 1; }),
         "profile");
  expect(OpenAfter([&](PageHeader& header) { header = good, header.namespace_id[0] ^= 1; }),
         "namespace");
  expect(OpenAfter([&](PageHeader& header) { header = good, header.first_token = 64; }),
         "first token is 64");
  expect(OpenAfter([&](PageHeader& header) { header = good, header.format_version = 9; }),
         "format version is 9");
  EXPECT_TRUE(OpenAfter([&](PageHeader& header) { header = good; }).ok());
}

TEST_F(MappedSourceTest, WrongBytesAreDataLossAtTheirFirstUse) {
  Corrupt(int2_, 1, 5);
  const auto source = transport_->Open(arena_.PrefixIn(int2_), Soon());
  ASSERT_TRUE(source.ok()) << "looking up touches no bytes";
  const absl::Status status = (*source)->WaitForLayer(0);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr("token 64, KV head 0"));
  EXPECT_EQ((*source)->Validate(), status) << "for ever";
  EXPECT_TRUE((*Transport(/*verify=*/false)->Open(arena_.PrefixIn(int2_), Soon()))->Validate().ok())
      << "an engine may do without";
}

TEST_F(MappedSourceTest, OnlyTheRanksOwnHeadsAreReadAndChecked) {
  Corrupt(int2_, 1, 5);  // Of KV head 0.
  const auto transport = Transport(true, {1, 1});
  const auto source = transport->Open(arena_.PrefixIn(int2_), Soon());
  ASSERT_TRUE(source.ok());
  EXPECT_TRUE((*source)->Validate().ok());
  EXPECT_EQ((*source)->HeadBlock(PageIdx(1), PageEncoding::kInt2, 0, 0), nullptr);
  EXPECT_NE((*source)->HeadBlock(PageIdx(1), PageEncoding::kInt2, 0, 1), nullptr);
}

TEST_F(MappedSourceTest, BytesAreCheckedOnceAGeneration) {
  ASSERT_TRUE((*transport_->Open(arena_.PrefixIn(int2_), Soon()))->WaitForLayer(0).ok());
  Corrupt(int2_, 1, 5);
  EXPECT_TRUE((*transport_->Open(arena_.PrefixIn(int2_), Soon()))->WaitForLayer(0).ok());
  // The block's next use is checked anew.
  arena_.header(int2_, 1).generation = 4;
  LeasedPrefix prefix = arena_.PrefixIn(int2_);
  prefix.pages[1].int2.generation = Generation(4);
  EXPECT_EQ((*transport_->Open(prefix, Soon()))->WaitForLayer(0).code(),
            absl::StatusCode::kDataLoss);
}

TEST_F(MappedSourceTest, GenerationThatMovedMakesWhatWasReadWorthless) {
  const auto source = transport_->Open(arena_.PrefixIn(int2_), Soon());
  ASSERT_TRUE((*source)->Validate().ok());
  arena_.header(int2_, 3).generation = 3;  // Being written.
  const absl::Status status = (*source)->Validate();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("page 3"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("generation 3 now, the lease was for 2"));
}

TEST_F(MappedSourceTest, BlockReusedBeforeItsFirstUseIsNoLossOfData) {
  const auto source = transport_->Open(arena_.PrefixIn(int2_), Soon());
  ASSERT_TRUE(source.ok());
  Corrupt(int2_, 1, 5);
  arena_.header(int2_, 1).generation = 4;
  EXPECT_EQ((*source)->WaitForLayer(0).code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(MappedSourceTest, ChunkThatCouldShrinkUnderAReaderIsRefused) {
  const ChunkId loose = arena_.AddChunk(PageEncoding::kInt2, 2, /*sealed=*/false);
  const absl::Status status = transport_->Open(arena_.PrefixIn(loose), Soon()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("not sealed against shrinking"));
}

TEST_F(MappedSourceTest, PlacesOutsideOfTheChunkAreRefused) {
  LeasedPrefix prefix = arena_.PrefixIn(int2_);
  prefix.pages[1].int2.block = 4;
  EXPECT_THAT(std::string(transport_->Open(prefix, Soon()).status().message()),
              HasSubstr("block 4 of chunk 1, which has 4 blocks"));
  prefix = arena_.PrefixIn(int2_);
  prefix.pages[1].bf16 = prefix.pages[1].int2;
  EXPECT_FALSE(transport_->Open(prefix, Soon()).ok()) << "a chunk has one encoding";
}

TEST_F(MappedSourceTest, PrefixOutlivesItsTransport) {
  auto source = transport_->Open(arena_.PrefixIn(int2_), Soon());
  ASSERT_TRUE(source.ok());
  transport_ = nullptr;
  EXPECT_TRUE((*source)->Validate().ok());
  EXPECT_EQ(*(*source)->HeadBlock(PageIdx(0), PageEncoding::kInt2, 0, 0),
            arena_.image(int2_, 0)[0]);
}

TEST_F(MappedSourceTest, IdleChunksAreUnmappedAndUsedOnesStay) {
  FakeClock clock;
  const ChunkId other = arena_.AddChunk(PageEncoding::kBf16, 1);
  auto transport = MapTransport::Connect({}, arena_.session(), clock.Now() + absl::Hours(1), clock);
  ASSERT_TRUE(transport.ok());
  const absl::Time deadline = clock.Now() + absl::Hours(1);
  auto used = (*transport)->Open(arena_.PrefixIn(int2_), deadline);
  ASSERT_TRUE(used.ok());
  ASSERT_TRUE((*transport)->Open(arena_.PrefixIn(other), deadline).ok());
  EXPECT_EQ((*transport)->num_mapped_chunks(), 2u);
  clock.Advance(ChunkCache<MappedChunk>::kMaxIdle - absl::Seconds(1));
  (*transport)->Maintain();
  EXPECT_EQ((*transport)->num_mapped_chunks(), 2u);
  clock.Advance(absl::Seconds(1));
  (*transport)->Maintain();
  EXPECT_EQ((*transport)->num_mapped_chunks(), 1u);
  used->reset();
  clock.Advance(ChunkCache<MappedChunk>::kMaxIdle);
  (*transport)->Maintain();
  EXPECT_EQ((*transport)->num_mapped_chunks(), 0u);
}

}  // namespace
}  // namespace crumb
