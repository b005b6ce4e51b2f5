// SPDX-License-Identifier: Apache-2.0
#include "client/transport/chunk_registrar.h"

#include <memory>
#include <vector>

#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/client/transport/fake_arena.h"
#include "tests/support/fake_clock.h"
#include "tests/support/test_profile.h"

namespace crumb {
namespace {

using testing::ElementsAre;

class ChunkRegistrarTest : public testing::Test {
 protected:
  ChunkRegistrarTest() {
    for (int i = 0; i < 4; ++i) {
      chunks_.push_back(*map_.Get(arena_.AddChunk(PageEncoding::kInt2, 1), PageEncoding::kInt2,
                                  absl::InfiniteFuture()));
    }
  }
  // Where a chunk stands in chunks_.
  size_t IndexOf(const MappedChunk& chunk) const {
    size_t index = 0;
    while (chunks_[index].get() != &chunk) {
      ++index;
    }
    return index;
  }
  std::vector<std::shared_ptr<MappedChunk>> Chunks(const std::vector<size_t>& indices) const {
    std::vector<std::shared_ptr<MappedChunk>> chunks;
    for (const size_t index : indices) {
      chunks.push_back(chunks_[index]);
    }
    return chunks;
  }

  FakeClock clock_;  // Stands still: a registration takes no time, and no rest is needed.
  FakeArena arena_{MakeTestProfile()};
  const SessionInfo session_ = arena_.session();
  MemorySocketClient socket_{session_, Clock::System()};
  ChunkMap map_{session_.profile->geometry(), &socket_, Clock::System()};
  std::vector<std::shared_ptr<MappedChunk>> chunks_;
};

TEST_F(ChunkRegistrarTest, RegistersInOrderAndWhatIsSetAnewInPlaceOfWhatWasNotBegun) {
  std::vector<size_t> registered;
  absl::Notification first_began;
  absl::Notification others_are_set;
  absl::Notification last;
  ChunkRegistrar registrar(
      [&](MappedChunk& chunk) {
        if (registered.empty()) {
          first_began.Notify();
          others_are_set.WaitForNotification();
        }
        registered.push_back(IndexOf(chunk));
        if (registered.back() == 1) {
          last.Notify();
        }
        return absl::OkStatus();
      },
      clock_);
  registrar.SetChunks(Chunks({0, 2}));
  first_began.WaitForNotification();
  registrar.SetChunks(Chunks({3, 1}));
  others_are_set.Notify();
  last.WaitForNotification();
  EXPECT_THAT(registered, ElementsAre(0, 3, 1));
}

TEST_F(ChunkRegistrarTest, AfterAnErrorNothingIsRegistered) {
  std::vector<size_t> registered;
  absl::Notification failed;
  {
    ChunkRegistrar registrar(
        [&](MappedChunk& chunk) {
          registered.push_back(IndexOf(chunk));
          failed.Notify();  // Twice would end the program.
          return absl::ResourceExhaustedError("RLIMIT_MEMLOCK");
        },
        clock_);
    registrar.SetChunks(Chunks({1, 2}));
    failed.WaitForNotification();
    registrar.SetChunks(Chunks({3}));
  }
  EXPECT_THAT(registered, ElementsAre(1));
  EXPECT_EQ(chunks_[2].use_count(), 2) << "the cache's and the test's";
}

}  // namespace
}  // namespace crumb
