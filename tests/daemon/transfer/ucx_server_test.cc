// SPDX-License-Identifier: Apache-2.0
//
// The UCX data plane end to end, the daemon in another process, by tcp alone and with cma: what is
// served is right, and what must not be served is refused.
#include "daemon/transfer/ucx_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"

#include "client/transport/ucx_transport.h"
#include "proto/base/crc32c.h"
#include "tests/support/transfer_pages.h"
#include "tests/support/transfer_process.h"

namespace crumb::testing {
namespace {

using ::testing::HasSubstr;

constexpr Geometry kGeometry{.num_layers = 5, .num_kv_heads = 3, .key_dim = 64, .value_dim = 64};
constexpr uint32_t kSinkPages = 1;
constexpr uint32_t kPages = 12;

absl::Time Soon() {
  return Clock::System().Now() + absl::Seconds(20);  // Longer than a loaded machine needs.
}

class UcxServerTest : public ::testing::TestWithParam<const char*> {
 protected:
  UcxServerTest() : profile_(MakeTransferProfile(kGeometry, kSinkPages)) {
    options_.ordered_layers = 2;  // Then images, however short they are.
  }

  // Starts a daemon with a published prefix of kPages pages, and connects.
  void Start(const std::vector<std::string>& more = {}) {
    std::vector<std::string> arguments = {absl::StrCat("transports=", GetParam()), "layers=5",
                                          "heads=3", "dim=64", "sink_pages=1"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    daemon_ = std::make_unique<TransferProcess>(arguments);
    daemon_->Ask(absl::StrCat("publish 1 ", kPages));
    session_ = daemon_->OpenSession(profile_);
    options_.ucx.transports = GetParam();
    options_.chunk_bytes = 10000;  // Cuts through head blocks, in layers and in images.
    transport_ = Connect(session_);
  }
  std::unique_ptr<PageTransport> Connect(const SessionInfo& session) {
    auto transport = ConnectUcxWithOptions(options_, session, Soon());
    EXPECT_TRUE(transport.ok()) << transport.status();
    return transport.ok() ? *std::move(transport) : nullptr;
  }
  absl::Status Pull(const LeasedPrefix& prefix, size_t* wrong_blocks = nullptr) {
    const auto source = transport_->Open(prefix, Soon());
    if (!source.ok()) {
      return source.status();
    }
    const absl::Status status = (*source)->Validate();
    if (status.ok() && wrong_blocks != nullptr) {
      *wrong_blocks = CountWrongBlocks(**source, session_, prefix, 1);
    }
    return status;
  }
  // The daemon counts and lets go of things on its own thread, a moment after its client is
  // content.
  void ExpectSoon(uint64_t TransferProcess::Stats::*count, uint64_t expected) {
    const absl::Time end = Soon();
    uint64_t value = daemon_->GetStats().*count;
    while (value != expected && Clock::System().Now() < end) {
      value = daemon_->GetStats().*count;
    }
    EXPECT_EQ(value, expected);
  }
  void ExpectNothingHeld() { ExpectSoon(&TransferProcess::Stats::held_pages, 0); }
  void ExpectNothingStaged() { ExpectSoon(&TransferProcess::Stats::staging_bytes, 0); }

  const std::shared_ptr<const Profile> profile_;
  std::unique_ptr<TransferProcess> daemon_;
  SessionInfo session_;
  UcxTransportOptions options_;
  std::unique_ptr<PageTransport> transport_;
};

TEST_P(UcxServerTest, HoweverTheStreamIsLaidOutTheBlocksAreThePublishedOnes) {
  Start();
  const LeasedPrefix prefix = daemon_->Lookup(session_, 1, kPages);
  for (const uint32_t ordered_layers : {0u, 1u, 3u, kGeometry.num_layers}) {
    for (const uint32_t chunk_bytes : {10000u, 1u << 20}) {
      options_.ordered_layers = ordered_layers;
      options_.chunk_bytes = chunk_bytes;
      transport_ = Connect(session_);
      size_t wrong = 1;
      const absl::Status status = Pull(prefix, &wrong);
      ASSERT_TRUE(status.ok()) << status;
      EXPECT_EQ(wrong, 0u) << ordered_layers << " layers in order, messages of " << chunk_bytes;
    }
  }
}

TEST_P(UcxServerTest, PulledPagesAreThePublishedOnes) {
  Start();
  const LeasedPrefix prefix = daemon_->Lookup(session_, 1, kPages);
  ASSERT_EQ(prefix.pages.size(), kPages);
  EXPECT_TRUE(prefix.pages[0].bf16.present());
  for (int round = 0; round < 5; ++round) {
    size_t wrong = 1;
    const absl::Status status = Pull(prefix, &wrong);
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(wrong, 0u);
  }
  daemon_->Ask(absl::StrCat("release ", session_.id.value(), " ", prefix.lease.value()));
  ExpectNothingHeld();
  ExpectSoon(&TransferProcess::Stats::pulled, 5);
}

// Of all TCP connections of this process.
uint64_t BytesReceivedByTcp() {
  uint64_t bytes = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    tcp_info info{};
    socklen_t size = sizeof(info);
    if (getsockopt(std::stoi(entry.path().filename()), IPPROTO_TCP, TCP_INFO, &info, &size) == 0) {
      bytes += info.tcpi_bytes_received;
    }
  }
  return bytes;
}

// Whether the system lets this process read the memory of `pid`, which is what cma does; 0 or
// errno.
int ErrorOfReadingMemoryOf(pid_t pid) {
  std::ifstream maps(absl::StrCat("/proc/", pid, "/maps"));
  uintptr_t address = 0;
  if (!(maps >> std::hex >> address)) {
    return EACCES;
  }
  char byte = 0;
  const iovec local{&byte, 1};
  const iovec remote{reinterpret_cast<void*>(address), 1};  // NOLINT: of another process.
  return process_vm_readv(pid, &local, 1, &remote, 1, 0) == 1 ? 0 : errno;
}

TEST_P(UcxServerTest, PageBytesComeByTheTransportThatIsOffered) {
  Start();
  const LeasedPrefix prefix = daemon_->Lookup(session_, 1, kPages);
  ASSERT_TRUE(Pull(prefix).ok());
  const uint64_t before = BytesReceivedByTcp();
  ASSERT_GT(before, 0u) << "the connection itself is TCP's";
  size_t pulled = 0;
  for (int round = 0; round < 5; ++round) {
    const auto source = transport_->Open(prefix, Soon());
    ASSERT_TRUE(source.ok()) << source.status();
    ASSERT_TRUE((*source)->Validate().ok());
    pulled += (*source)->copied_bytes();
  }
  const uint64_t by_tcp = BytesReceivedByTcp() - before;
  if (std::string(GetParam()) == "tcp") {
    EXPECT_GE(by_tcp, pulled);
    return;
  }
  if (const int error = ErrorOfReadingMemoryOf(daemon_->pid()); error != 0) {
    GTEST_SKIP() << "this system does not let one process read another's memory ("
                 << std::generic_category().message(error)
                 << "; see kernel.yama.ptrace_scope and seccomp), so UCX has no cma to choose; "
                 << by_tcp << " of " << pulled << " bytes came by TCP";
  }
  EXPECT_LT(by_tcp, pulled / 10) << "of " << pulled << " bytes: cma was offered and not chosen";
}

TEST_P(UcxServerTest, ALayerIsThereWhenItsWaitReturns) {
  Start();
  const LeasedPrefix prefix = daemon_->Lookup(session_, 1, kPages);
  const auto source = transport_->Open(prefix, Soon());
  ASSERT_TRUE(source.ok()) << source.status();
  std::vector<std::byte> expected(kGeometry.HeadBlockBytes(PageEncoding::kInt2));
  for (uint32_t layer = 0; layer < kGeometry.num_layers; ++layer) {
    ASSERT_TRUE((*source)->WaitForLayer(layer).ok());
    for (uint32_t page = kSinkPages; page < kPages; ++page) {
      FillBlock(expected, 1, page, PageEncoding::kInt2, layer, 2);
      const std::byte* block = (*source)->HeadBlock(PageIdx(page), PageEncoding::kInt2, layer, 2);
      ASSERT_NE(block, nullptr);
      EXPECT_TRUE(std::equal(expected.begin(), expected.end(), block));
      EXPECT_EQ(reinterpret_cast<uintptr_t>(block) % 64, 0u);
    }
  }
  EXPECT_EQ((*source)->HeadBlock(PageIdx(0), PageEncoding::kInt2, 0, 0), nullptr);
  EXPECT_EQ((*source)->HeadBlock(PageIdx(kPages), PageEncoding::kInt2, 0, 0), nullptr);
  EXPECT_EQ((*source)->HeadBlock(PageIdx(1), PageEncoding::kInt2, 0, 3), nullptr);
}

TEST_P(UcxServerTest, ManyPullsAtOnceOfOneAndOfSeveralSessions) {
  Start();
  const SessionInfo other_session = daemon_->OpenSession(profile_);
  const auto other_transport = Connect(other_session);
  std::vector<std::unique_ptr<PageSource>> sources;
  std::vector<LeasedPrefix> prefixes;
  for (int i = 0; i < 20; ++i) {
    const bool other = i % 2 != 0;
    prefixes.push_back(daemon_->Lookup(other ? other_session : session_, 1, kPages));
    auto source = (other ? other_transport : transport_)->Open(prefixes.back(), Soon());
    ASSERT_TRUE(source.ok()) << source.status();
    sources.push_back(*std::move(source));
  }
  for (size_t i = 0; i < sources.size(); ++i) {
    const absl::Status status = sources[i]->Validate();
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(CountWrongBlocks(*sources[i], session_, prefixes[i], 1), 0u);
  }
}

TEST_P(UcxServerTest, ASourceOutlivesItsTransport) {
  Start();
  const LeasedPrefix prefix = daemon_->Lookup(session_, 1, kPages);
  auto source = transport_->Open(prefix, Soon());
  ASSERT_TRUE(source.ok());
  transport_.reset();
  EXPECT_TRUE((*source)->Validate().ok());
  EXPECT_EQ(CountWrongBlocks(**source, session_, prefix, 1), 0u);
}

TEST_P(UcxServerTest, AbandonedPullsLeaveTheConnectionUsable) {
  Start();
  const LeasedPrefix prefix = daemon_->Lookup(session_, 1, kPages);
  for (int i = 0; i < 50; ++i) {
    ASSERT_TRUE(transport_->Open(prefix, Soon()).ok());  // Dropped at once.
  }
  EXPECT_TRUE(Pull(prefix).ok());
}

TEST_P(UcxServerTest, AWrongSecretAndAForeignSessionAreRefused) {
  Start();
  SessionInfo wrong = session_;
  wrong.secret[3] ^= 1;
  absl::Status status = ConnectUcxWithOptions(options_, wrong, Soon()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnauthenticated) << status;
  wrong = session_;
  wrong.id = SessionId(987654);
  status = ConnectUcxWithOptions(options_, wrong, Soon()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  ExpectSoon(&TransferProcess::Stats::refused, 2);

  // Another session's lease.
  const SessionInfo other = daemon_->OpenSession(profile_);
  status = Pull(daemon_->Lookup(other, 1, kPages));
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("lease"));
}

TEST_P(UcxServerTest, AnotherGenerationAndAPageBeyondTheLeaseAreRefused) {
  Start();
  LeasedPrefix prefix = daemon_->Lookup(session_, 1, kPages);
  prefix.pages[3].int2.generation = Generation(prefix.pages[3].int2.generation.value() + 2);
  absl::Status status = Pull(prefix);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("page 3 is of generation"));

  prefix = daemon_->Lookup(session_, 1, kPages);
  prefix.pages.push_back(prefix.pages.back());
  status = Pull(prefix);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;

  prefix = daemon_->Lookup(session_, 1, kPages);
  prefix.pages[5].bf16 = prefix.pages[5].int2;
  status = Pull(prefix);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
}

TEST_P(UcxServerTest, AnotherGeometryOrNamespaceIsRefused) {
  Start();
  SessionInfo other = session_;
  Geometry geometry = kGeometry;
  geometry.num_layers = 6;
  other.profile = MakeTransferProfile(geometry, kSinkPages);
  transport_ = Connect(other);
  LeasedPrefix prefix = daemon_->Lookup(session_, 1, kPages);
  absl::Status status = Pull(prefix);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;

  transport_ = Connect(session_);
  prefix.namespace_id.bytes[0] ^= 1;
  status = Pull(prefix);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("namespace"));
}

TEST_P(UcxServerTest, AReleasedAndAnExpiredLeaseAreRefused) {
  Start({"lease_ms=200"});
  LeasedPrefix prefix = daemon_->Lookup(session_, 1, kPages);
  daemon_->Ask(absl::StrCat("release ", session_.id.value(), " ", prefix.lease.value()));
  EXPECT_EQ(Pull(prefix).code(), absl::StatusCode::kFailedPrecondition);

  prefix = daemon_->Lookup(session_, 1, kPages);
  ExpectNothingHeld();  // Ends when the lease does.
  EXPECT_EQ(Pull(prefix).code(), absl::StatusCode::kFailedPrecondition);
}

TEST_P(UcxServerTest, TheEndOfASessionEndsItsConnection) {
  Start();
  const LeasedPrefix prefix = daemon_->Lookup(session_, 1, kPages);
  ASSERT_TRUE(Pull(prefix).ok());
  daemon_->Ask(absl::StrCat("end ", session_.id.value()));
  ExpectSoon(&TransferProcess::Stats::peers, 0);
  const absl::Time end = Soon();
  // A new connection of the same session is turned away with the reason. The old one may not have
  // noticed its end yet.
  absl::Status status = Pull(prefix);
  while (status.code() == absl::StatusCode::kUnavailable && Clock::System().Now() < end) {
    status = Pull(prefix);
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  ExpectNothingHeld();
}

TEST_P(UcxServerTest, OneFlippedBitIsDataLoss) {
  Start();
  const LeasedPrefix prefix = daemon_->Lookup(session_, 1, kPages);
  daemon_->Ask("corrupt 1 7");
  const absl::Status status = Pull(prefix);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("page at token 448, KV head 1"));
}

TEST_P(UcxServerTest, AnotherVersionOfUcxIsNamedBeforeConnecting) {
  Start();
  SessionInfo session = session_;
  session.ucx_version = "1.22.0";
  absl::Status status = ConnectUcxWithOptions(options_, session, Soon()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("daemon runs UCX 1.22.0"));
  session.ucx_host.clear();
  status = ConnectUcx(session, Soon()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
}

TEST_P(UcxServerTest, APeerThatSaysNoHelloIsClosed) {
  Start({"hello_timeout_ms=300"});
  class Silent final : public UcxWorker::Handler {
   public:
    bool OnPeer(UcxPeerId) override { return false; }
    void OnMessage(UcxPeerId, UcxMessage&) override {}
    void OnLost(UcxPeerId, const absl::Status&) override { lost_.Notify(); }
    void OnTick(absl::Time) override {}
    absl::Notification lost_;
  } silent;
  auto worker = UcxWorker::Create(options_.ucx, silent);
  ASSERT_TRUE(worker.ok());
  ASSERT_TRUE((*worker)
                  ->Call([&] { return (*worker)->Connect("127.0.0.1", daemon_->port()).status(); })
                  .ok());
  EXPECT_TRUE(silent.lost_.WaitForNotificationWithTimeout(absl::Seconds(20)));
}

TEST_P(UcxServerTest, PublishedBytesReachStagingInOrderOverSeveralCalls) {
  Start();
  std::vector<std::byte> first(100000);
  std::vector<std::byte> second(5000);
  for (size_t i = 0; i < first.size(); ++i) {
    first[i] = static_cast<std::byte>(i * 7 + i / 256);
  }
  std::fill(second.begin(), second.end(), std::byte{9});
  const OutgoingPage pages[] = {{PageIdx(0), PageEncoding::kBf16, first},
                                {PageIdx(1), PageEncoding::kInt2, second}};
  absl::Status status = transport_->SendPages(PublishId(77), pages, Soon());
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(daemon_->GetStats().staging_bytes, 105000u);
  status = transport_->SendPages(PublishId(77), {pages, 1}, Soon());
  ASSERT_TRUE(status.ok()) << status;
  std::fill(second.begin(), second.end(), std::byte{0});  // Ours again on return.

  std::vector<std::byte> all = first;
  all.insert(all.end(), 5000, std::byte{9});
  all.insert(all.end(), first.begin(), first.end());
  const std::string publish = absl::StrCat(session_.id.value(), " 77");
  for (int commit = 0; commit < 2; ++commit) {
    EXPECT_EQ(daemon_->Ask(absl::StrCat("staged ", publish)),
              absl::StrCat("staged 205000 ", Crc32c(all)));
  }
  daemon_->Ask(absl::StrCat("unstage ", publish));
  EXPECT_THAT(daemon_->Ask(absl::StrCat("staged ", publish)), HasSubstr("refused"));
  ExpectNothingStaged();
  ExpectSoon(&TransferProcess::Stats::pushed, 2);
}

TEST_P(UcxServerTest, StagingIsBoundedAndEndsWithItsSession) {
  Start({"staging_mb=1"});
  const std::vector<std::byte> image(600 << 10);
  const OutgoingPage page{PageIdx(0), PageEncoding::kBf16, image};
  ASSERT_TRUE(transport_->SendPages(PublishId(1), {&page, 1}, Soon()).ok());
  const absl::Status status = transport_->SendPages(PublishId(2), {&page, 1}, Soon());
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("614400 of 1048576 bytes"));
  EXPECT_EQ(transport_->SendPages(PublishId(3), {}, Soon()).code(),
            absl::StatusCode::kInvalidArgument);
  // A second session sees nothing of the first one's.
  const SessionInfo other = daemon_->OpenSession(profile_);
  EXPECT_THAT(daemon_->Ask(absl::StrCat("staged ", other.id.value(), " 1")), HasSubstr("refused"));
  daemon_->Ask(absl::StrCat("end ", session_.id.value()));
  ExpectNothingStaged();
}

INSTANTIATE_TEST_SUITE_P(Transports,
                         UcxServerTest,
                         ::testing::Values("tcp", "cma,tcp"),
                         [](const auto& parameter) {
                           return std::string(parameter.param) == "tcp" ? "tcp" : "cma";
                         });

}  // namespace
}  // namespace crumb::testing
