// SPDX-License-Identifier: Apache-2.0
//
// Pages in the daemon's GPU memory, read in place by engines of other processes; and what happens
// when either end dies. Needs a GPU.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "crumb/cuda/shared_memory.h"
#include "tests/client/e2e/gpu_client_fixture.h"

namespace crumb {
namespace {

using testing::HasSubstr;

TEST_F(GpuClientTest, PublishedPagesAreReadInTheDaemonsGpuMemoryWithoutACopy) {
  StartGpuDaemon();
  EXPECT_THAT(daemon_->Log(), HasSubstr("GPU memory: GPU 0"));
  const auto client = NewGpuClient();
  EXPECT_TRUE(client->state().reads_gpu_pages) << client->state().gpu_note;
  Publish(client.get(), 512);
  const auto prefix = LookupOnGpu(client.get(), 513);
  EXPECT_EQ(prefix->usable_tokens(), 512u);
  EXPECT_EQ(prefix->copied_bytes(), 0u);
  EXPECT_EQ(prefix->HeadBlock(PageIdx(3), PageEncoding::kInt2, 0, 0), nullptr);
  const auto images = HostImages(client.get(), 513);
  ExpectSamePages(*prefix, images);
  // The tail, for the next engine's recent window.
  EXPECT_NE(prefix->GpuPage(PageIdx(7), PageEncoding::kBf16), nullptr);
  EXPECT_EQ(prefix->GpuPage(PageIdx(8), PageEncoding::kInt2), nullptr);

  GpuAttention attention(*prefix, *profile_);
  const std::vector<float> got = attention.Run();
  const std::vector<float> expected = attention.Expected(images, profile_->geometry());
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_NEAR(got[i], expected[i], 1e-3) << "element " << i;
  }
  EXPECT_TRUE(prefix->Validate().ok()) << prefix->Validate();
}

TEST_F(GpuClientTest, EnginesWithoutAGpuAndOnItShareThePages) {
  StartGpuDaemon();
  const auto on_host = NewClient();
  const auto sequence = Prefill(512);
  ASSERT_TRUE(on_host->Publish(*sequence, std::span(prompt_).first(512), {}).ok());
  auto engine = StartEngine(daemon_->address());
  ASSERT_TRUE(engine.ok()) << engine.status();
  EXPECT_EQ(engine->Ask("lookup 5 513"), "found 512, 8 pages on the GPU");
  EXPECT_EQ(engine->Ask("validate"), "OK");
  const auto prefix = *on_host->Lookup(std::span(prompt_).first(513), {});
  EXPECT_EQ(prefix->GpuPage(PageIdx(3), PageEncoding::kInt2), nullptr);
  EXPECT_NE(prefix->HeadBlock(PageIdx(3), PageEncoding::kInt2, 0, 0), nullptr);
}

TEST_F(GpuClientTest, EngineThatWritesToPagesChangesNothing) {
  StartGpuDaemon();
  const auto client = NewGpuClient();
  Publish(client.get(), 512);
  const auto prefix = LookupOnGpu(client.get(), 513);
  const auto images = HostImages(client.get(), 513);
  for (const char* way : {"fill", "store"}) {
    auto engine = StartEngine(daemon_->address());
    ASSERT_TRUE(engine.ok()) << engine.status();
    EXPECT_EQ(engine->Ask("lookup 5 513"), "found 512, 8 pages on the GPU");
    EXPECT_NE(engine->Ask(way), "cudaSuccess") << way;
    ExpectSamePages(*prefix, images);
  }
  EXPECT_TRUE(prefix->Validate().ok()) << prefix->Validate();
}

TEST_F(GpuClientTest, DaemonKilledUnderAMapIsAStatusAndTheKernelReadsOn) {
  StartGpuDaemon();
  const auto client = NewGpuClient();
  Publish(client.get(), 512);
  const auto prefix = LookupOnGpu(client.get(), 513);
  const auto images = HostImages(client.get(), 513);
  GpuAttention attention(*prefix, *profile_);
  const std::vector<float> before = attention.Run();
  daemon_->Kill();
  EXPECT_EQ(attention.Run(), before);
  ExpectSamePages(*prefix, images);
  WaitFor([&] { return !prefix->Validate().ok(); });
  EXPECT_EQ(prefix->Validate().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_FALSE(client->Lookup(std::span(prompt_).first(513), {.on_gpu = true}).ok());
  // With the next daemon all is as at the start.
  RestartDaemon();
  ASSERT_TRUE(client->WaitAttached(absl::Seconds(20)).ok());
  Publish(client.get(), 512);
  const auto again = LookupOnGpu(client.get(), 513);
  EXPECT_EQ(GpuAttention(*again, *profile_).Run(), before);
  EXPECT_EQ(attention.Run(), before) << "the dead daemon's memory lives as long as it is mapped";
}

TEST_F(GpuClientTest, DaemonKilledWhileEnginesDecodeIsAStatusInEachAndNoErrorOfCudas) {
  StartGpuDaemon();
  const auto client = NewGpuClient();
  Publish(client.get(), 512);
  std::vector<EngineProcess> engines;
  for (int i = 0; i < 2; ++i) {
    auto engine = StartEngine(daemon_->address());
    ASSERT_TRUE(engine.ok()) << engine.status();
    EXPECT_EQ(engine->Ask("lookup 5 513"), "found 512, 8 pages on the GPU");
    EXPECT_EQ(engine->Ask("watch"), "decoding");
    engines.push_back(*std::move(engine));
  }
  daemon_->Kill();
  for (EngineProcess& engine : engines) {
    EXPECT_EQ(engine.ReadLine(), "FAILED_PRECONDITION, cudaSuccess");
  }
  // They go on with the next daemon.
  RestartDaemon();
  ASSERT_TRUE(client->WaitAttached(absl::Seconds(20)).ok());
  Publish(client.get(), 512);
  for (EngineProcess& engine : engines) {
    std::string found;
    WaitFor([&] { return (found = engine.Ask("lookup 5 513")).starts_with("found"); });
    EXPECT_EQ(found, "found 512, 8 pages on the GPU");
    EXPECT_EQ(engine.Ask("validate"), "OK");
  }
}

TEST_F(GpuClientTest, EngineKilledInAKernelHarmsNothingAndItsPagesComeFree) {
  StartGpuDaemon({"--store.gpu_arena=64MiB", "--store.gpu_chunk=4MiB", "--store.quarantine=100ms"});
  const auto client = NewGpuClient();
  Publish(client.get(), 512);
  for (int round = 0; round < 3; ++round) {
    auto engine = StartEngine(daemon_->address());
    ASSERT_TRUE(engine.ok()) << engine.status();
    EXPECT_EQ(engine->Ask("lookup 5 513"), "found 512, 8 pages on the GPU");
    EXPECT_EQ(engine->Ask("decode"), "decoding");
    engine->Kill();
  }
  EXPECT_TRUE(StatusBecomes("\"leased_pages\": 0")) << status_;
  const auto prefix = LookupOnGpu(client.get(), 513);
  ExpectSamePages(*prefix, HostImages(client.get(), 513));
  EXPECT_TRUE(prefix->Validate().ok()) << prefix->Validate();
}

TEST_F(GpuClientTest, FullArenaKeepsWhatIsLeasedAndDropsWhatIsCold) {
  // Two chunks of 2 MiB: BF16 has 31 blocks of 64 KiB, INT2 170 of 12 KiB.
  StartGpuDaemon({"--store.gpu_arena=4MiB", "--store.gpu_chunk=2MiB"});
  const auto client = NewGpuClient();
  Publish(client.get(), 512);
  const auto prefix = LookupOnGpu(client.get(), 513);
  const auto images = HostImages(client.get(), 513);
  ASSERT_NO_FATAL_FAILURE(PublishUntilCopiesSpill(client.get()));
  ExpectSamePages(*prefix, images);
  EXPECT_TRUE(prefix->Validate().ok()) << prefix->Validate();
  // What was dropped comes back for those who look it up.
  const auto cold = client->Lookup(E2ePrompt(100, 1024), {.on_gpu = true});
  ASSERT_TRUE(cold.ok()) << cold.status();
  WaitFor([&] {
    const auto again = client->Lookup(E2ePrompt(100, 1024), {.on_gpu = true});
    return again.ok() && PagesOnGpu(**again, *profile_) > 8;
  });
}

TEST_F(GpuClientTest, EngineStoppedForLongerThanItsLeaseLosesItsPagesAndNobodyElseDoes) {
  StartGpuDaemon({"--store.gpu_arena=4MiB", "--store.gpu_chunk=2MiB", "--store.lease=1s",
                  "--store.quarantine=100ms"});
  const auto client = NewGpuClient();
  Publish(client.get(), 512);
  const auto images = HostImages(client.get(), 513);
  auto engine = StartEngine(daemon_->address());
  ASSERT_TRUE(engine.ok()) << engine.status();
  ASSERT_EQ(engine->Ask("lookup 5 513"), "found 512, 8 pages on the GPU");
  ASSERT_EQ(engine->Ask("validate"), "OK");
  engine->Signal(SIGSTOP);
  EXPECT_TRUE(StatusBecomes("\"leased_pages\": 0")) << status_;
  const absl::Time until = Clock::System().Now() + absl::Milliseconds(1200);
  WaitFor([&] { return Clock::System().Now() > until; });  // By its own clock as well.
  // Its memory becomes others'.
  ASSERT_NO_FATAL_FAILURE(PublishUntilCopiesSpill(client.get()));
  engine->Send("validate");
  engine->Signal(SIGCONT);
  EXPECT_THAT(engine->ReadLine(), testing::StartsWith("FAILED_PRECONDITION"));
  // The pages come back for who asks, and are what they were.
  std::string found;
  WaitFor([&] { return (found = engine->Ask("lookup 5 513")).starts_with("found"); });
  EXPECT_EQ(found, "found 512, 8 pages on the GPU");
  EXPECT_EQ(engine->Ask("validate"), "OK");
  ExpectSamePages(*LookupOnGpu(client.get(), 513), images);
}

TEST_F(GpuClientTest, DaemonWithoutMemoryOnTheDeviceServesFromHostMemory) {
  StartGpuDaemon({"--store.capacity=2TiB", "--store.gpu_arena=1TiB", "--store.gpu_chunk=64GiB"});
  EXPECT_THAT(daemon_->Log(), HasSubstr("gpu_arena_off"));
  EXPECT_THAT(daemon_->Log(), HasSubstr("RESOURCE_EXHAUSTED"));
  const auto client = NewGpuClient();
  EXPECT_FALSE(client->state().reads_gpu_pages);
  EXPECT_THAT(client->state().gpu_note, HasSubstr("out of memory"));
  Publish(client.get(), 512);
  const auto prefix = client->Lookup(std::span(prompt_).first(513), {.on_gpu = true});
  ASSERT_TRUE(prefix.ok()) << prefix.status();
  EXPECT_EQ(PagesOnGpu(**prefix, *profile_), 0u);
  EXPECT_NE((*prefix)->HeadBlock(PageIdx(3), PageEncoding::kInt2, 0, 0), nullptr);
  EXPECT_TRUE((*prefix)->Validate().ok());
}

TEST_F(GpuClientTest, DaemonWithoutAnArenaSaysWhy) {
  StartDaemon();
  const auto client = NewGpuClient();
  EXPECT_FALSE(client->state().reads_gpu_pages);
  EXPECT_THAT(client->state().gpu_note, HasSubstr("gpu_arena is 0"));
}

TEST_F(GpuClientTest, OtherTenantsSeeNothing) {
  StartGpuDaemon();
  const auto client = NewGpuClient();
  Publish(client.get(), 512);
  const auto prefix = LookupOnGpu(client.get(), 513);
  const auto other = NewGpuClient("other");
  const auto missed = other->Lookup(std::span(prompt_).first(513), {.on_gpu = true});
  ASSERT_TRUE(missed.ok()) << missed.status();
  EXPECT_EQ((*missed)->num_pages(), 0u);
  EXPECT_EQ((*missed)->GpuPage(PageIdx(0), PageEncoding::kBf16), nullptr);
}

TEST_F(GpuClientTest, GpuThatIsNotThereIsRefusedByName) {
  StartDaemon();
  const auto client =
      Client::Create({.address = daemon_->address(), .profile = profile_, .gpu = 63});
  EXPECT_EQ(client.status().code(), absl::StatusCode::kInvalidArgument) << client.status();
  EXPECT_THAT(client.status().message(), HasSubstr("ClientOptions::gpu is 63"));
}

TEST_F(GpuClientTest, DescriptorWhoseOwnerDiedStillOpensAndHasItsBytes) {
  StartDaemon();
  auto owner = StartEngine(daemon_->address());
  ASSERT_TRUE(owner.ok()) << owner.status();
  std::istringstream answer(owner->Ask("share"));
  pid_t pid = 0;
  int fd = -1;
  ASSERT_TRUE(answer >> pid >> fd);
  const UniqueFd process(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  const UniqueFd descriptor(static_cast<int>(::syscall(SYS_pidfd_getfd, process.get(), fd, 0)));
  if (descriptor.get() < 0) {
    GTEST_SKIP() << "pidfd_getfd: " << std::strerror(errno);
  }
  owner->Kill();
  const auto opened = SharedGpuMemory::Open(0, descriptor.get(), 1);
  ASSERT_TRUE(opened.ok()) << opened.status();
  std::vector<uint8_t> bytes((*opened)->bytes());
  CRUMB_EXPECT_CUDA(
      cudaMemcpy(bytes.data(), (*opened)->data(), bytes.size(), cudaMemcpyDeviceToHost));
  EXPECT_EQ(std::count(bytes.begin(), bytes.end(), 7), static_cast<ptrdiff_t>(bytes.size()));
}

using SharedGpuMemoryTest = GpuFixture<testing::Test>;

TEST_F(SharedGpuMemoryTest, DescriptorOfSomethingElseIsRefusedAndLeavesNoErrorBehind) {
  const int memfd = ::memfd_create("no-gpu-memory", MFD_CLOEXEC);
  for (const int fd : {memfd, 0, 9999}) {
    const auto opened = SharedGpuMemory::Open(0, fd, size_t{2} << 20);
    EXPECT_EQ(opened.status().code(), absl::StatusCode::kFailedPrecondition) << opened.status();
    EXPECT_THAT(opened.status().message(), HasSubstr("descriptor"));
  }
  ::close(memfd);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  CRUMB_EXPECT_CUDA(cudaDeviceSynchronize());
}

TEST_F(SharedGpuMemoryTest, IsZeroAndTheSameForBothEnds) {
  const auto made = SharedGpuMemory::Create(0, 1);
  ASSERT_TRUE(made.ok()) << made.status();
  EXPECT_GE((*made)->bytes(), size_t{2} << 20);
  std::vector<uint8_t> bytes((*made)->bytes(), 1);
  CRUMB_EXPECT_CUDA(
      cudaMemcpy(bytes.data(), (*made)->data(), bytes.size(), cudaMemcpyDeviceToHost));
  EXPECT_EQ(std::count(bytes.begin(), bytes.end(), 0), static_cast<ptrdiff_t>(bytes.size()));
  const auto opened = SharedGpuMemory::Open(0, (*made)->fd(), 1);
  ASSERT_TRUE(opened.ok()) << opened.status();
  CRUMB_EXPECT_CUDA(cudaMemset((*made)->data(), 7, bytes.size()));
  CRUMB_EXPECT_CUDA(
      cudaMemcpy(bytes.data(), (*opened)->data(), bytes.size(), cudaMemcpyDeviceToHost));
  EXPECT_EQ(std::count(bytes.begin(), bytes.end(), 7), static_cast<ptrdiff_t>(bytes.size()));
}

}  // namespace
}  // namespace crumb
