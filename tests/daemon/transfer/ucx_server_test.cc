// SPDX-License-Identifier: Apache-2.0
//
// The UCX data plane end to end, the daemon in another process, by tcp alone and with cma: what is
// served is right. ucx_refusals_test.cc has what must not be served.
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

#include "proto/base/crc32c.h"
#include "tests/daemon/transfer/ucx_server_fixture.h"
#include "tests/support/host_upload.h"

namespace crumb::testing {
namespace {

using ::testing::HasSubstr;

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

TEST_P(UcxServerTest, HoweverAPullIsLaidOutItsUploadIsPageImages) {
  Start();
  const LeasedPrefix prefix = daemon_->Lookup(session_, 1, kPages);
  const UploadShape shape{.geometry = kGeometry, .heads = session_.heads, .num_pages = kPages};
  for (const uint32_t ordered_layers : {0u, 1u, 3u, kGeometry.num_layers}) {
    options_.ordered_layers = ordered_layers;
    const auto transport = Connect(session_);
    const auto source = *transport->Open(prefix, Soon());
    ASSERT_TRUE(source->Validate().ok()) << source->Validate();
    for (const uint32_t layers_per_group : {1u, 2u, 100u}) {
      const HostUpload upload(shape, *source, layers_per_group);
      EXPECT_EQ(CountWrongBlocks(upload, session_, prefix, 1), 0u)
          << ordered_layers << " layers in order, " << layers_per_group << " a group";
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

TEST_P(UcxServerTest, APullComesOverAsManyConnectionsAsThereAre) {
  Start();
  const LeasedPrefix prefix = daemon_->Lookup(session_, 1, kPages);
  for (const uint32_t num_links : {1u, 2u, 5u}) {
    options_.num_links = num_links;
    transport_ = Connect(session_);
    ExpectSoon(&TransferProcess::Stats::peers, num_links);
    size_t wrong = 1;
    const absl::Status status = Pull(prefix, &wrong);
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(wrong, 0u) << num_links << " links";
  }
  options_.num_links = 0;
  EXPECT_EQ(ConnectUcxWithOptions(options_, session_, Soon()).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_P(UcxServerTest, TwoTransportsOfOneSessionDoNotTakeEachOthersBytes) {
  Start();
  const LeasedPrefix prefix = daemon_->Lookup(session_, 1, kPages);
  const auto other = Connect(session_);
  for (PageTransport* transport : {other.get(), transport_.get(), other.get()}) {
    const auto source = transport->Open(prefix, Soon());
    ASSERT_TRUE(source.ok()) << source.status();
    EXPECT_TRUE((*source)->Validate().ok()) << (*source)->Validate();
    EXPECT_EQ(CountWrongBlocks(**source, session_, prefix, 1), 0u);
  }
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
  absl::Status status = transport_->SendPages(PublishId(77), 0, pages, Soon());
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(daemon_->GetStats().staging_bytes, 105000u);
  status = transport_->SendPages(PublishId(77), 105'000, {pages, 1}, Soon());
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
  ASSERT_TRUE(transport_->SendPages(PublishId(1), 0, {&page, 1}, Soon()).ok());
  const absl::Status status = transport_->SendPages(PublishId(2), 0, {&page, 1}, Soon());
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("614400 of 1048576 bytes"));
  EXPECT_EQ(transport_->SendPages(PublishId(3), 0, {}, Soon()).code(),
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
