// SPDX-License-Identifier: Apache-2.0
//
// Pages read in a daemon's GPU memory, from the descriptors on: a real memory socket, and the
// pretended GPU.
#include "client/transport/gpu_source.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "client/transport/map_transport.h"
#include "tests/client/transport/fake_arena.h"
#include "tests/support/fake_gpu.h"
#include "tests/support/test_profile.h"

namespace crumb {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr uint32_t kPages = 4;

class GpuSourceTest : public testing::Test {
 protected:
  static absl::Time Soon() { return Clock::System().Now() + absl::Seconds(10); }

  // Of an engine on the daemon's GPU.
  std::unique_ptr<MapTransport> Transport() {
    SessionInfo session = arena_.session();
    session.gpu = 0;
    auto transport = MapTransport::Connect({}, session, Soon());
    EXPECT_TRUE(transport.ok()) << transport.status();
    return *std::move(transport);
  }
  // All pages but the first have copies.
  LeasedPrefix Prefix() const {
    LeasedPrefix prefix = arena_.PrefixIn(chunk_);
    for (uint32_t page = 1; page < kPages; ++page) {
      prefix.pages[page].gpu_int2 = prefix.pages[page].int2;
    }
    return prefix;
  }
  // What a new engine is told.
  std::string Refusal() {
    const absl::Status status = Transport()->OpenOnGpu(Prefix(), Soon()).status();
    EXPECT_FALSE(status.ok());
    return status.ToString();
  }

  std::shared_ptr<const Profile> profile_ = MakeTestProfile(
      {.geometry = {.num_layers = 2, .num_kv_heads = 2, .key_dim = 64, .value_dim = 64}});
  FakeArena arena_{profile_};
  const ChunkId chunk_ = arena_.AddChunk(PageEncoding::kInt2, kPages);
};

TEST_F(GpuSourceTest, PagesWithACopyAreReadThereAndTheOthersInHostMemory) {
  arena_.AddCopies(chunk_);
  const auto transport = Transport();
  const auto source = transport->OpenOnGpu(Prefix(), Soon());
  ASSERT_TRUE(source.ok()) << source.status();
  EXPECT_EQ((*source)->GpuPage(PageIdx(0), PageEncoding::kInt2), nullptr);
  EXPECT_NE((*source)->HeadBlock(PageIdx(0), PageEncoding::kInt2, 0, 0), nullptr);
  for (uint32_t page = 1; page < kPages; ++page) {
    EXPECT_EQ((*source)->HeadBlock(PageIdx(page), PageEncoding::kInt2, 0, 0), nullptr);
    EXPECT_EQ((*source)->GpuPage(PageIdx(page), PageEncoding::kBf16), nullptr);
    const std::span<const std::byte> image = arena_.image(chunk_, page);
    const std::byte* const on_gpu = (*source)->GpuPage(PageIdx(page), PageEncoding::kInt2);
    EXPECT_TRUE(std::equal(image.begin(), image.end(), on_gpu)) << page;
    EXPECT_TRUE(CheckIsGpuMemory(on_gpu, image.size()).ok()) << page;
  }
  EXPECT_EQ((*source)->copied_bytes(), 0u);
  EXPECT_EQ(transport->num_mapped_gpu_chunks(), 1u);
  EXPECT_TRUE((*source)->Validate().ok()) << (*source)->Validate();
  // The page is somebody else's from here on.
  arena_.header(chunk_, 2).generation = 4;
  const absl::Status moved = (*source)->Validate();
  EXPECT_EQ(moved.code(), absl::StatusCode::kFailedPrecondition) << moved;
  EXPECT_THAT(std::string(moved.message()), HasSubstr("page 2"));
}

TEST_F(GpuSourceTest, HeadersThatAreNotWhatTheLeaseNamedAreRefused) {
  arena_.AddCopies(chunk_);
  const PageHeader good = arena_.header(chunk_, 2);
  arena_.header(chunk_, 2).generation = 4;
  EXPECT_THAT(Refusal(), AllOf(HasSubstr("FAILED_PRECONDITION"), HasSubstr("page 2")));
  arena_.header(chunk_, 2) = good;
  arena_.header(chunk_, 2).profile_id[0] ^= 1;
  EXPECT_THAT(Refusal(), HasSubstr("profile"));
  arena_.header(chunk_, 2) = good;
  arena_.header(chunk_, 2).namespace_id[0] ^= 1;
  EXPECT_THAT(Refusal(), HasSubstr("namespace"));
  arena_.header(chunk_, 2) = good;
  EXPECT_TRUE(Transport()->OpenOnGpu(Prefix(), Soon()).ok());
}

TEST_F(GpuSourceTest, ChunkThatIsNotWhatItsReplySaysIsRefusedByName) {
  // None at all.
  EXPECT_THAT(Refusal(), HasSubstr("chunk 1 of copies came without its two descriptors"));
  // Too small for its pages, by its own words.
  arena_.AddCopies(chunk_, /*bytes=*/4096);
  EXPECT_THAT(Refusal(), AllOf(HasSubstr("FAILED_PRECONDITION: chunk 1 of copies has 4096 bytes "
                                         "for 4 pages"),
                               HasSubstr("which do not fit")));
  // And in truth.
  arena_.AddCopies(chunk_, /*bytes=*/size_t{1} << 30);
  EXPECT_THAT(Refusal(), HasSubstr("FAILED_PRECONDITION: chunk 1 of copies: descriptor"));
  // A place beyond its end.
  arena_.AddCopies(chunk_);
  LeasedPrefix prefix = Prefix();
  prefix.pages[3].gpu_int2.block = kPages;
  const absl::Status beyond = Transport()->OpenOnGpu(prefix, Soon()).status();
  EXPECT_EQ(beyond.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(beyond.message()), HasSubstr("page 3: the daemon places its copy in"));
  EXPECT_EQ(FakeGpu::allocated_bytes(), 0u) << "nothing stays mapped";
}

TEST_F(GpuSourceTest, MappingThatFailsIsAStatusAndTheNextOneSucceeds) {
  arena_.AddCopies(chunk_);
  const auto transport = Transport();
  const uint64_t num_calls = FakeGpu::FailEachCall(
      [&] { return transport->OpenOnGpu(Prefix(), Soon()).status(); },
      [](const absl::Status& status) {
        EXPECT_TRUE(status.ok() || absl::IsResourceExhausted(status)) << status;
      });
  EXPECT_GE(num_calls, 1u);
  EXPECT_EQ(transport->num_mapped_gpu_chunks(), 1u);
}

}  // namespace
}  // namespace crumb
