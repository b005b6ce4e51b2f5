// SPDX-License-Identifier: Apache-2.0
#include "client/transport/memory_socket_client.h"

#include <fcntl.h>

#include <string>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/client/transport/fake_arena.h"
#include "tests/support/test_profile.h"

namespace crumb {
namespace {

using testing::HasSubstr;

class MemorySocketClientTest : public testing::Test {
 protected:
  static absl::Time In(absl::Duration duration) { return Clock::System().Now() + duration; }

  FakeArena arena_{MakeTestProfile()};
  MemorySocketClient client_{arena_.session(), Clock::System()};
};

TEST_F(MemorySocketClientTest, BringsTheChunkAndItsShape) {
  const ChunkId id = arena_.AddChunk(PageEncoding::kInt2, 3);
  const auto chunk = client_.GetChunk(id, In(absl::Seconds(5)));
  ASSERT_TRUE(chunk.ok()) << chunk.status();
  EXPECT_EQ(chunk->num_blocks, 3u);
  EXPECT_NE(::fcntl(chunk->memfd.get(), F_GET_SEALS) & F_SEAL_FUTURE_WRITE, 0);
}

TEST_F(MemorySocketClientTest, TheDaemonsRefusalComesThroughAsItIs) {
  arena_.SetStatus(absl::UnauthenticatedError("session 7: another secret"));
  const absl::Status status = client_.GetChunk(ChunkId(1), In(absl::Seconds(5))).status();
  EXPECT_EQ(status, absl::UnauthenticatedError("session 7: another secret"));
  arena_.SetStatus(absl::OkStatus());
  const ChunkId id = arena_.AddChunk(PageEncoding::kInt2, 1);
  EXPECT_TRUE(client_.GetChunk(id, In(absl::Seconds(5))).ok()) << "the connection goes on";
}

TEST_F(MemorySocketClientTest, NoListenerIsUnavailableWithThePath) {
  SessionInfo session = arena_.session();
  session.memory_socket = "/nonexistent/crumb.sock";
  MemorySocketClient client(session, Clock::System());
  const absl::Status status = client.Connect(In(absl::Seconds(5)));
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("/nonexistent/crumb.sock"));
}

TEST_F(MemorySocketClientTest, PathsThatNoSocketCanHaveAreNamed) {
  SessionInfo session = arena_.session();
  session.memory_socket = std::string(200, 'x');
  EXPECT_THAT(
      std::string(
          MemorySocketClient(session, Clock::System()).Connect(In(absl::Seconds(5))).message()),
      HasSubstr("the path has 200 bytes, at most 107"));
  session.memory_socket.clear();
  EXPECT_THAT(
      std::string(
          MemorySocketClient(session, Clock::System()).Connect(In(absl::Seconds(5))).message()),
      HasSubstr("offers no memory socket"));
}

TEST_F(MemorySocketClientTest, SilentDaemonCostsTheDeadlineAndNoMore) {
  const ChunkId id = arena_.AddChunk(PageEncoding::kInt2, 1);
  arena_.SetMood(FakeArena::Mood::kSilent);
  const absl::Time began = Clock::System().Now();
  EXPECT_EQ(client_.GetChunk(id, In(absl::Milliseconds(80))).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  const absl::Duration took = Clock::System().Now() - began;
  EXPECT_GE(took, absl::Milliseconds(80));
  EXPECT_LT(took, absl::Seconds(2));
  // A late answer to the first request is not taken for that to the second.
  arena_.SetMood(FakeArena::Mood::kAnswer);
  EXPECT_TRUE(client_.GetChunk(id, In(absl::Seconds(5))).ok());
}

TEST_F(MemorySocketClientTest, WhoWaitsForItsTurnWaitsNoLongerThanItsOwnDeadline) {
  arena_.SetMood(FakeArena::Mood::kSilent);
  std::thread patient([&] { (void)client_.GetChunk(ChunkId(1), In(absl::Seconds(2))); });
  while (arena_.num_requests() == 0) {
    std::this_thread::yield();
  }
  const absl::Time began = Clock::System().Now();
  EXPECT_EQ(client_.GetChunk(ChunkId(1), In(absl::Milliseconds(50))).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_LT(Clock::System().Now() - began, absl::Seconds(1));
  arena_.CloseConnections();
  patient.join();
}

TEST_F(MemorySocketClientTest, ConnectsAnewWhenTheDaemonHasClosedTheConnection) {
  const ChunkId id = arena_.AddChunk(PageEncoding::kInt2, 1);
  ASSERT_TRUE(client_.GetChunk(id, In(absl::Seconds(5))).ok());
  arena_.CloseConnections();
  EXPECT_TRUE(client_.GetChunk(id, In(absl::Seconds(5))).ok());
}

TEST_F(MemorySocketClientTest, HangingUpInsteadOfAnsweringIsUnavailable) {
  arena_.SetMood(FakeArena::Mood::kHangUp);
  const absl::Status status = client_.GetChunk(ChunkId(1), In(absl::Seconds(5))).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("closed the connection"));
}

TEST_F(MemorySocketClientTest, AnotherVersionIsRefusedByNumber) {
  arena_.SetMood(FakeArena::Mood::kOtherVersion);
  const absl::Status status = client_.GetChunk(ChunkId(1), In(absl::Seconds(5))).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("version 99"));
}

}  // namespace
}  // namespace crumb
