// SPDX-License-Identifier: Apache-2.0
//
// The daemon's memory socket against peers that behave and peers that do not: raw packets over the
// real socket, and a real store behind it.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "daemon/transfer/memory_socket_server.h"
#include "tests/daemon/transfer/memory_socket_peer.h"
#include "tests/support/fake_copy_tier.h"
#include "tests/support/store_testing.h"

namespace crumb {
namespace {

using testing::AllOf;
using testing::HasSubstr;

using Answer = MemorySocketAnswer;
using Peer = MemorySocketPeer;

constexpr unsigned kStagingSeals = F_SEAL_SHRINK | F_SEAL_GROW;

class MemorySocketTest : public testing::Test {
 protected:
  MemorySocketTest() {
    auto server = MemorySocketServer::Create({.path = path_, .mode = 0600, .max_connections = 8},
                                             *store_, sessions_);
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }

  SessionId Attach(const std::string& tenant, const SessionSecret& secret) {
    const auto session = store_->OpenSession(SmallSession(tenant));
    EXPECT_TRUE(session.ok()) << session.status();
    sessions_.Add(*session, secret);
    return *session;
  }
  MemoryRequest Request(MemoryOp op, uint64_t argument) const {
    MemoryRequest request;
    request.op = op;
    request.session_id = session_.value();
    request.session_secret = secret_;
    request.argument = argument;
    return request;
  }
  // A chunk of the tenant's.
  uint64_t PublishedChunk(SessionId session) {
    EXPECT_TRUE(PublishAll(store_.get(), session, "", PagesOf("abcd")).ok());
    const auto found = store_->Lookup(session, "", PromptOf("abcd", 1), true);
    EXPECT_TRUE(found.ok() && !found->pages.empty());
    const PageRef& page = found->pages.front();
    return (page.bf16.has_value() ? page.bf16 : page.int2)->chunk.value();
  }
  static UniqueFd Memfd(off_t bytes, unsigned seals) {
    UniqueFd memfd(memfd_create("staging", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    EXPECT_EQ(ftruncate(memfd.get(), bytes), 0);
    EXPECT_EQ(fcntl(memfd.get(), F_ADD_SEALS, seals), 0);
    return memfd;
  }
  // Gives `memfd` as staging memory of `bytes` bytes on a new connection.
  Answer Give(int memfd, uint64_t bytes) {
    Peer peer(path_);
    auto answer = peer.Ask(Request(MemoryOp::kGiveStaging, bytes), std::span(&memfd, 1));
    EXPECT_TRUE(answer.has_value());
    return answer.has_value() ? *std::move(answer) : Answer{};
  }
  // What a well-behaved engine gets, whatever others have done.
  void ExpectServes() {
    Peer peer(path_);
    ASSERT_TRUE(peer.is_connected());
    const auto answer = peer.Ask(Request(MemoryOp::kGetChunk, chunk_));
    ASSERT_TRUE(answer.has_value()) << "the daemon serves no more";
    EXPECT_EQ(answer->code(), absl::StatusCode::kOk) << answer->message();
    EXPECT_TRUE(answer->fd.is_valid());
  }

  const std::string path_ = (std::filesystem::path(testing::TempDir()) /
                             absl::StrCat("memory_socket_test.", getpid(), ".sock"))
                                .string();
  FakeCopyTier tier_{/*segment_bytes=*/size_t{72} << 10, /*num_segments=*/4};
  const std::unique_ptr<PageStore> store_ =
      *PageStore::Create({.capacity_bytes = size_t{16} << 20, .chunk_bytes = size_t{1} << 20},
                         Clock::System(),
                         &tier_);
  SessionTable sessions_;
  const SessionSecret secret_ = MakeSessionSecret();
  const SessionId session_ = Attach("default", secret_);
  const uint64_t chunk_ = PublishedChunk(session_);
  std::unique_ptr<MemorySocketServer> server_;
};

TEST_F(MemorySocketTest, ListHasTheChunksOfTheSessionsTenantTheNewestFirst) {
  PublishedChunk(Attach("other", MakeSessionSecret()));
  Peer peer(path_);
  const auto list = [&](MemoryOp op, uint64_t below) {
    const auto answer = peer.Ask(Request(op, below));
    EXPECT_TRUE(answer.has_value() && answer->code() == absl::StatusCode::kOk);
    EXPECT_LE(answer->reply.num_blocks, kMaxListedChunks);
    return ListedChunksOf(answer->reply);
  };
  const auto all = list(MemoryOp::kListChunks, 0);
  ASSERT_EQ(all.size(), 2u) << "one of each encoding";
  EXPECT_GT(all[0].id, all[1].id);
  EXPECT_NE(all[0].encoding, all[1].encoding);
  EXPECT_TRUE(all[0].id == chunk_ || all[1].id == chunk_);
  const auto older = list(MemoryOp::kListChunks, all[0].id);
  ASSERT_EQ(older.size(), 1u);
  EXPECT_EQ(older[0].id, all[1].id);
  EXPECT_TRUE(list(MemoryOp::kListChunks, all[1].id).empty());
  EXPECT_TRUE(list(MemoryOp::kListCopyChunks, 0).empty());
}

TEST_F(MemorySocketTest, ChunkOfCopiesComesAsTwoDescriptorsAndToItsTenantAlone) {
  ASSERT_GT(CopyAll(store_.get(), &tier_), 0u);
  Peer peer(path_);
  const auto listed = peer.Ask(Request(MemoryOp::kListCopyChunks, 0));
  ASSERT_TRUE(listed.has_value());
  const auto chunks = ListedChunksOf(listed->reply);
  ASSERT_FALSE(chunks.empty());
  const auto answer = peer.Ask(Request(MemoryOp::kGetCopyChunk, chunks[0].id));
  ASSERT_TRUE(answer.has_value());
  EXPECT_EQ(answer->code(), absl::StatusCode::kOk) << answer->message();
  ASSERT_TRUE(answer->fd.is_valid() && answer->second_fd.is_valid());
  EXPECT_EQ(answer->reply.bytes, tier_.segment_bytes());
  EXPECT_GT(answer->reply.num_blocks, 0u);
  // Headers are sealed, as all that engines map of the host's memory.
  EXPECT_EQ(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, answer->fd.get(), 0),
            MAP_FAILED);
  // One that is not there, none, and a stranger.
  const auto ask = [&](uint64_t id) { return peer.Ask(Request(MemoryOp::kGetCopyChunk, id)); };
  EXPECT_EQ(ask(99)->code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ask(0)->code(), absl::StatusCode::kInvalidArgument);
  const SessionSecret secret = MakeSessionSecret();
  MemoryRequest request = Request(MemoryOp::kGetCopyChunk, chunks[0].id);
  request.session_id = Attach("other", secret).value();
  request.session_secret = secret;
  const auto refused = peer.Ask(request);
  ASSERT_TRUE(refused.has_value());
  EXPECT_EQ(refused->code(), absl::StatusCode::kPermissionDenied);
  EXPECT_FALSE(refused->fd.is_valid() || refused->second_fd.is_valid());
  ExpectServes();
}

TEST_F(MemorySocketTest, SocketHasTheModeAndGoesWithTheServer) {
  struct stat info {};
  ASSERT_EQ(stat(path_.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, mode_t{0600});
  EXPECT_THAT(server_->Description(), HasSubstr(path_));
  server_->Stop();
  EXPECT_FALSE(std::filesystem::exists(path_));
  EXPECT_FALSE(Peer(path_).is_connected());
}

TEST_F(MemorySocketTest, ChunkComesSealedAndCannotBeWritten) {
  Peer peer(path_);
  const auto answer = peer.Ask(Request(MemoryOp::kGetChunk, chunk_));
  ASSERT_TRUE(answer.has_value());
  ASSERT_EQ(answer->code(), absl::StatusCode::kOk) << answer->message();
  EXPECT_GT(answer->reply.num_blocks, 0u);
  struct stat info {};
  ASSERT_EQ(fstat(answer->fd.get(), &info), 0);
  EXPECT_EQ(static_cast<uint64_t>(info.st_size), answer->reply.bytes);
  EXPECT_EQ(mmap(nullptr, answer->reply.bytes, PROT_WRITE, MAP_SHARED, answer->fd.get(), 0),
            MAP_FAILED);
  EXPECT_NE(ftruncate(answer->fd.get(), 0), 0);
  EXPECT_TRUE(peer.Ask(Request(MemoryOp::kGetChunk, chunk_)).has_value()) << "the next request";
}

TEST_F(MemorySocketTest, WrongSecretIsDeniedWhateverByteDiffers) {
  Peer peer(path_);
  for (const size_t byte : {size_t{0}, kSessionSecretBytes - 1}) {
    MemoryRequest request = Request(MemoryOp::kGetChunk, chunk_);
    request.session_secret[byte] ^= 1;
    const auto answer = peer.Ask(request);
    ASSERT_TRUE(answer.has_value());
    EXPECT_EQ(answer->code(), absl::StatusCode::kUnauthenticated);
    EXPECT_FALSE(answer->fd.is_valid());
  }
  EXPECT_EQ(peer.Ask(Request(MemoryOp::kGetChunk, chunk_))->code(), absl::StatusCode::kOk);
}

TEST_F(MemorySocketTest, UnknownAndEndedSessionsAreToldToAttach) {
  Peer peer(path_);
  MemoryRequest request = Request(MemoryOp::kGetChunk, chunk_);
  request.session_id = 12345;
  EXPECT_EQ(peer.Ask(request)->code(), absl::StatusCode::kFailedPrecondition);
  sessions_.Remove(session_);
  const auto answer = peer.Ask(Request(MemoryOp::kGetChunk, chunk_));
  ASSERT_TRUE(answer.has_value());
  EXPECT_EQ(answer->code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(answer->message(),
              AllOf(HasSubstr(std::to_string(session_.value())), HasSubstr("attach")));
}

TEST_F(MemorySocketTest, ChunkOfAnotherTenantIsDenied) {
  const SessionId other = Attach("other", MakeSessionSecret());
  const uint64_t foreign = PublishedChunk(other);
  ASSERT_NE(foreign, chunk_);
  const auto answer = Peer(path_).Ask(Request(MemoryOp::kGetChunk, foreign));
  ASSERT_TRUE(answer.has_value());
  EXPECT_EQ(answer->code(), absl::StatusCode::kPermissionDenied) << answer->message();
  EXPECT_FALSE(answer->fd.is_valid());
  ExpectServes();
}

TEST_F(MemorySocketTest, ChunksThatAreNoneAreRefused) {
  Peer peer(path_);
  EXPECT_EQ(peer.Ask(Request(MemoryOp::kGetChunk, 99999))->code(), absl::StatusCode::kNotFound);
  for (const uint64_t id : {uint64_t{0}, uint64_t{1} << 32, (uint64_t{1} << 32) + chunk_}) {
    const auto answer = peer.Ask(Request(MemoryOp::kGetChunk, id));
    ASSERT_TRUE(answer.has_value());
    EXPECT_EQ(answer->code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(answer->message(), HasSubstr(std::to_string(id)));
  }
}

TEST_F(MemorySocketTest, StagingMemoryIsTakenAndReplaced) {
  const UniqueFd first = Memfd(4096, kStagingSeals);
  ASSERT_EQ(pwrite(first.get(), "crumb", 5, 0), 5);
  EXPECT_EQ(Give(first.get(), 4096).code(), absl::StatusCode::kOk);
  const auto held = sessions_.Staging(session_);
  ASSERT_TRUE(held.ok()) << held.status();
  ASSERT_EQ((*held)->bytes().size(), 4096u);
  EXPECT_EQ(std::memcmp((*held)->bytes().data(), "crumb", 5), 0);
  const UniqueFd second = Memfd(8192, kStagingSeals);
  EXPECT_EQ(Give(second.get(), 8192).code(), absl::StatusCode::kOk);
  EXPECT_EQ((*sessions_.Staging(session_))->bytes().size(), 8192u);
  EXPECT_EQ(std::memcmp((*held)->bytes().data(), "crumb", 5), 0) << "a commit may still read it";
}

TEST_F(MemorySocketTest, StagingMemoryThatCouldShrinkOrGrowIsRefused) {
  for (const unsigned seals : {0u, unsigned{F_SEAL_SHRINK}, unsigned{F_SEAL_GROW}}) {
    const UniqueFd memfd = Memfd(4096, seals);
    const Answer answer = Give(memfd.get(), 4096);
    EXPECT_EQ(answer.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(answer.message(), HasSubstr("F_SEAL_SHRINK and F_SEAL_GROW"));
  }
  EXPECT_FALSE(sessions_.Staging(session_).ok());
  ExpectServes();
}

TEST_F(MemorySocketTest, StagingMemoryOfAnotherSizeIsRefusedWithBothSizes) {
  const UniqueFd memfd = Memfd(4096, kStagingSeals);
  for (const uint64_t bytes : {4095u, 4097u, 8192u}) {
    const Answer answer = Give(memfd.get(), bytes);
    EXPECT_EQ(answer.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(answer.message(),
                AllOf(HasSubstr("4096 bytes"), HasSubstr(absl::StrCat("says ", bytes))));
  }
  for (const uint64_t bytes : {uint64_t{0}, kMaxStagingBytes + 1, ~uint64_t{0}}) {
    const Answer answer = Give(memfd.get(), bytes);
    EXPECT_EQ(answer.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(answer.message(), AllOf(HasSubstr(std::to_string(bytes)),
                                        HasSubstr(std::to_string(kMaxStagingBytes))));
  }
}

TEST_F(MemorySocketTest, StagingMemoryThatIsNoMemfdIsRefused) {
  const UniqueFd null(open("/dev/null", O_RDWR | O_CLOEXEC));
  EXPECT_THAT(Give(null.get(), 4096).message(), HasSubstr("not a memfd"));
  Peer peer(path_);
  const auto answer = peer.Ask(Request(MemoryOp::kGiveStaging, 4096));  // No descriptor.
  ASSERT_TRUE(answer.has_value());
  EXPECT_EQ(answer->code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(answer->message(), HasSubstr("SCM_RIGHTS"));
}

TEST_F(MemorySocketTest, UnknownOperationIsAnsweredAndTheConnectionStays) {
  Peer peer(path_);
  const auto answer = peer.Ask(Request(static_cast<MemoryOp>(77), 0));
  ASSERT_TRUE(answer.has_value());
  EXPECT_EQ(answer->code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(answer->message(), HasSubstr("77"));
  EXPECT_EQ(peer.Ask(Request(MemoryOp::kGetChunk, chunk_))->code(), absl::StatusCode::kOk);
}

TEST_F(MemorySocketTest, PacketsThatAreNoRequestsAreToldWhyAndTheConnectionCloses) {
  MemoryRequest other_magic = Request(MemoryOp::kGetChunk, chunk_);
  other_magic.magic = 0x12345678;
  MemoryRequest other_version = Request(MemoryOp::kGetChunk, chunk_);
  other_version.version = 99;
  const std::vector<std::byte> long_packet(sizeof(MemoryRequest) + 100);
  const struct {
    std::span<const std::byte> packet;
    const char* message;
  } cases[] = {
      {std::as_bytes(std::span(&other_magic, 1)), "magic 12345678"},
      {std::as_bytes(std::span(&other_version, 1)), "version 99"},
      {std::span(long_packet).first(1), "a packet of 1 bytes"},
      {std::span(long_packet).first(sizeof(MemoryRequest) - 1), "a packet of 39 bytes"},
      {long_packet, "requests on the memory socket have 40"},
  };
  for (const auto& [packet, message] : cases) {
    Peer peer(path_);
    ASSERT_TRUE(peer.Send(packet));
    const auto answer = peer.Receive();
    ASSERT_TRUE(answer.has_value()) << message;
    EXPECT_EQ(answer->code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(answer->message(), HasSubstr(message));
    EXPECT_FALSE(peer.Receive().has_value()) << "the connection is closed";
  }
  ExpectServes();
}

TEST_F(MemorySocketTest, RandomPacketsWithDescriptorsDoNotStopIt) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937 random(seed);
  const UniqueFd null(open("/dev/null", O_RDONLY | O_CLOEXEC));
  for (int round = 0; round < 300; ++round) {
    std::vector<std::byte> packet(random() % 100 + 1);
    for (std::byte& byte : packet) {
      byte = static_cast<std::byte>(random());
    }
    if (packet.size() >= 8 && round % 2 == 0) {  // Past the first checks, now and then.
      packet.resize(sizeof(MemoryRequest));
      std::memcpy(packet.data(), &kMemorySocketMagic, sizeof(kMemorySocketMagic));
      std::memcpy(packet.data() + 4, &kMemorySocketVersion, sizeof(kMemorySocketVersion));
    }
    const std::vector<int> fds(random() % 20, null.get());
    Peer peer(path_);
    ASSERT_TRUE(peer.is_connected());
    ASSERT_TRUE(peer.Send(packet, fds));
    if (const auto answer = peer.Receive(); answer.has_value()) {
      EXPECT_NE(answer->code(), absl::StatusCode::kOk);
    }
  }
  ExpectServes();
}

TEST_F(MemorySocketTest, DescriptorsOfRefusedRequestsDoNotStayOpen) {
  const auto open_here = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                         std::filesystem::directory_iterator());
  };
  const UniqueFd null(open("/dev/null", O_RDONLY | O_CLOEXEC));
  const std::vector<int> fds(8, null.get());
  Peer peer(path_);  // The server is of this process: its descriptors are counted too.
  ASSERT_TRUE(peer.Ask(Request(MemoryOp::kGetChunk, chunk_)).has_value());
  const auto before = open_here();
  for (int round = 0; round < 20; ++round) {
    ASSERT_TRUE(peer.Ask(Request(MemoryOp::kGetChunk, 99999), fds).has_value());
  }
  // The server answers first and closes then: the last request's may still be open for a moment.
  for (const absl::Time end = absl::Now() + absl::Seconds(10);
       open_here() > before && absl::Now() < end;) {
    std::this_thread::yield();
  }
  EXPECT_LE(open_here(), before);
}

TEST_F(MemorySocketTest, PeerThatNeverReadsIsClosedAndHoldsNoOneUp) {
  Peer deaf(path_);
  const MemoryRequest request = Request(MemoryOp::kGetChunk, 99999);
  bool closed = false;
  for (int i = 0; i < 100000 && !closed; ++i) {
    closed = !deaf.Send(std::as_bytes(std::span(&request, 1)));
  }
  EXPECT_TRUE(closed);
  ExpectServes();
}

TEST_F(MemorySocketTest, OneConnectionTooManyIsToldTheLimit) {
  std::vector<std::unique_ptr<Peer>> peers;
  for (int i = 0; i < 8; ++i) {
    peers.push_back(std::make_unique<Peer>(path_));
    ASSERT_TRUE(peers.back()->Ask(Request(MemoryOp::kGetChunk, chunk_)).has_value());
  }
  Peer late(path_);
  const auto answer = late.Receive();
  ASSERT_TRUE(answer.has_value());
  EXPECT_EQ(answer->code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(answer->message(), HasSubstr("8 connections"));
  EXPECT_FALSE(late.Receive().has_value());
  EXPECT_TRUE(peers.front()->Ask(Request(MemoryOp::kGetChunk, chunk_)).has_value());
}

}  // namespace
}  // namespace crumb
