// SPDX-License-Identifier: Apache-2.0
//
// Pages between host memory and an engine's GPU, both ways. Needs a GPU.
#include <algorithm>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/client/e2e/gpu_client_fixture.h"
#include "tests/client/e2e/uploaded_pages.h"

namespace crumb {
namespace {

using testing::HasSubstr;

TEST_F(GpuClientTest, PagesInHostMemoryAreCopiedToTheGpu) {
  StartDaemon();
  const auto client = NewGpuClient();
  Publish(client.get(), 512);
  const auto prefix = *client->Lookup(std::span(prompt_).first(513), {});
  const auto images = HostImages(client.get(), 513);
  for (const uint32_t layers_per_group : {1u, 2u, 64u}) {
    const auto upload = prefix->UploadToGpu({.layers_per_group = layers_per_group});
    ASSERT_TRUE(upload.ok()) << upload.status();
    EXPECT_TRUE((*upload)->registration().ok()) << (*upload)->registration();
    TestStream stream;
    ASSERT_TRUE((*upload)->DelayUntilLayer(1, stream.get()).ok());
    stream.Wait();
    for (uint32_t page = 0; page < 8; ++page) {
      const PageEncoding encoding = page == 0 ? PageEncoding::kBf16 : PageEncoding::kInt2;
      const std::byte* const image = (*upload)->Page(PageIdx(page), encoding);
      ASSERT_NE(image, nullptr);
      EXPECT_EQ(Download(image, encoding), images[page]) << "page " << page;
    }
    EXPECT_NE((*upload)->Page(PageIdx(7), PageEncoding::kBf16), nullptr);
    EXPECT_EQ((*upload)->Page(PageIdx(0), PageEncoding::kInt2), nullptr);
    const Geometry& geometry = profile_->geometry();
    EXPECT_EQ((*upload)->copied_bytes(), 7 * geometry.PageBytes(PageEncoding::kInt2) +
                                             3 * geometry.PageBytes(PageEncoding::kBf16));
    EXPECT_EQ((*upload)->DelayUntilLayer(2, stream.get()).code(),
              absl::StatusCode::kInvalidArgument);
    EXPECT_TRUE((*upload)->Validate().ok()) << (*upload)->Validate();
  }
  EXPECT_EQ(prefix->UploadToGpu({.layers_per_group = 0}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(GpuClientTest, PulledPagesAreCopiedToTheGpuByWayOfPageLockedMemory) {
  StartDaemon({"--ucx.enabled=true", "--ucx.transports=tcp"});
  const auto publisher = NewClient();
  Publish(publisher.get(), 512);
  const auto images = HostImages(publisher.get(), 513);
  const auto client = *Client::Create({.address = daemon_->address(),
                                       .profile = profile_,
                                       .data_plane = DataPlane::kUcx,
                                       .gpu = 0});
  ASSERT_TRUE(client->WaitAttached(absl::Seconds(20)).ok());
  EXPECT_FALSE(client->state().reads_gpu_pages);
  EXPECT_THAT(client->state().gpu_note, HasSubstr("page-locked host memory"));
  for (int pull = 0; pull < 2; ++pull) {
    const auto prefix = *client->Lookup(std::span(prompt_).first(513), {});
    const auto upload = prefix->UploadToGpu({.layers_per_group = 1});
    ASSERT_TRUE(upload.ok()) << upload.status();
    EXPECT_TRUE((*upload)->registration().ok()) << (*upload)->registration();
    ASSERT_TRUE((*upload)->Validate().ok()) << (*upload)->Validate();
    // Of the tail just the BF16 rows are pulled.
    EXPECT_NE((*upload)->Page(PageIdx(7), PageEncoding::kBf16), nullptr);
    EXPECT_EQ((*upload)->Page(PageIdx(7), PageEncoding::kInt2), nullptr);
    for (uint32_t page = 0; page < 6; ++page) {
      const PageEncoding encoding = page == 0 ? PageEncoding::kBf16 : PageEncoding::kInt2;
      EXPECT_EQ(Download((*upload)->Page(PageIdx(page), encoding), encoding), images[page])
          << "pull " << pull << ", page " << page;
    }
  }
}

TEST_F(GpuClientTest, RankGetsItsHeadsAtTheirPlacesInTheImage) {
  StartDaemon();
  Publish(NewClient().get(), 512);
  const auto images = HostImages(NewClient().get(), 513);
  auto client = *Client::Create(
      {.address = daemon_->address(), .profile = profile_, .heads = {1, 1}, .gpu = 0});
  ASSERT_TRUE(client->WaitAttached(absl::Seconds(20)).ok());
  const auto prefix = *client->Lookup(std::span(prompt_).first(513), {});
  const auto upload = prefix->UploadToGpu({});
  ASSERT_TRUE(upload.ok()) << upload.status();
  ASSERT_TRUE((*upload)->Validate().ok()) << (*upload)->Validate();
  const Geometry& geometry = profile_->geometry();
  const size_t offset = geometry.HeadBlockOffset(PageEncoding::kInt2, 1, 1);
  std::vector<std::byte> block(geometry.HeadBlockBytes(PageEncoding::kInt2));
  CRUMB_EXPECT_CUDA(cudaMemcpy(block.data(),
                               (*upload)->Page(PageIdx(5), PageEncoding::kInt2) + offset,
                               block.size(), cudaMemcpyDeviceToHost));
  EXPECT_TRUE(std::equal(block.begin(), block.end(), images[5].data() + offset));
}

TEST_F(GpuClientTest, WhatIsOnTheGpuStaysInPlaceAndOnlyTheRestIsCopied) {
  // One chunk, in which the two pages of the tail are demoted; the rest finds no room after that.
  StartGpuDaemon({"--store.gpu_arena=2MiB", "--store.gpu_chunk=2MiB"});
  const auto client = NewGpuClient();
  Publish(client.get(), 512);
  const auto prefix = *client->Lookup(std::span(prompt_).first(513), {.on_gpu = true});
  ASSERT_NE(prefix->GpuPage(PageIdx(7), PageEncoding::kInt2), nullptr);
  EXPECT_EQ(prefix->GpuPage(PageIdx(0), PageEncoding::kBf16), nullptr);
  const auto images = HostImages(client.get(), 513);
  const auto upload = prefix->UploadToGpu({});
  ASSERT_TRUE(upload.ok()) << upload.status();
  EXPECT_EQ((*upload)->Page(PageIdx(7), PageEncoding::kInt2),
            prefix->GpuPage(PageIdx(7), PageEncoding::kInt2));
  const Geometry& geometry = profile_->geometry();
  EXPECT_EQ((*upload)->copied_bytes(), 5 * geometry.PageBytes(PageEncoding::kInt2) +
                                           3 * geometry.PageBytes(PageEncoding::kBf16));
  ASSERT_TRUE((*upload)->Validate().ok()) << (*upload)->Validate();
  for (uint32_t page = 0; page < 8; ++page) {
    const PageEncoding encoding = page == 0 ? PageEncoding::kBf16 : PageEncoding::kInt2;
    EXPECT_EQ(Download((*upload)->Page(PageIdx(page), encoding), encoding), images[page]);
  }
}

TEST_F(GpuClientTest, DaemonKilledUnderAnUploadIsAStatusAndTheCopiesAreWhole) {
  StartDaemon();
  const auto client = NewGpuClient();
  Publish(client.get(), 512);
  const auto images = HostImages(client.get(), 513);
  const auto prefix = *client->Lookup(std::span(prompt_).first(513), {});
  const auto upload = prefix->UploadToGpu({.layers_per_group = 1});
  ASSERT_TRUE(upload.ok()) << upload.status();
  daemon_->Kill();
  WaitFor([&] { return !(*upload)->Validate().ok(); });
  EXPECT_EQ((*upload)->Validate().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Download((*upload)->Page(PageIdx(3), PageEncoding::kInt2), PageEncoding::kInt2),
            images[3]);
  const auto again = prefix->UploadToGpu({});
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_FALSE((*again)->Validate().ok());
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST_F(GpuClientTest, CopiesAreCheckedOnTheGpuInPlaceOfAPassOnTheHost) {
  StartDaemon();
  Publish(NewClient().get(), 512);
  for (const bool spoiled : {false, true}) {
    const auto client = NewGpuClient();
    const auto prefix = *client->Lookup(std::span(prompt_).first(513), {});
    const auto upload = *prefix->UploadToGpu({});
    TestStream stream;
    ASSERT_TRUE(upload->DelayUntilLayer(1, stream.get()).ok());
    stream.Wait();
    if (spoiled) {
      // As a copy that went wrong: the host's bytes are right.
      auto* const image = const_cast<std::byte*>(upload->Page(PageIdx(3), PageEncoding::kInt2));
      CRUMB_EXPECT_CUDA(cudaMemset(image + 100, 0x5a, 8));
    }
    EXPECT_EQ(upload->Validate().code(),
              spoiled ? absl::StatusCode::kDataLoss : absl::StatusCode::kOk)
        << upload->Validate();
    EXPECT_TRUE(prefix->Validate().ok()) << prefix->Validate();
  }
}

TEST_F(GpuClientTest, DeviceWithoutMemoryForAnUploadIsAStatusWithTheBytes) {
  StartDaemon();
  const auto client = NewGpuClient();
  Publish(client.get(), 512);
  const auto prefix = *client->Lookup(std::span(prompt_).first(513), {});
  {
    std::vector<DeviceBuffer<std::byte>> all;
    size_t available = 0;
    size_t total = 0;
    for (size_t bytes = size_t{1} << 36; bytes >= size_t{1} << 12;) {
      void* memory = nullptr;
      CRUMB_EXPECT_CUDA(cudaMemGetInfo(&available, &total));
      if (bytes > available || cudaMalloc(&memory, bytes) != cudaSuccess) {
        cudaGetLastError();
        bytes /= 2;
        continue;
      }
      CRUMB_EXPECT_CUDA(cudaFree(memory));
      all.emplace_back(bytes);
    }
    const absl::Status status = prefix->UploadToGpu({}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("bytes of a prefix to GPU 0"));
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  }
  const auto upload = prefix->UploadToGpu({});
  ASSERT_TRUE(upload.ok()) << upload.status();
  EXPECT_TRUE((*upload)->Validate().ok()) << (*upload)->Validate();
}

TEST_F(GpuClientTest, PagesInAnEnginesGpuMemoryArePublished) {
  StartGpuDaemon();
  const auto client = NewGpuClient();
  Publish(client.get(), 512);
  const auto images = HostImages(client.get(), 513);
  const auto prefix = *client->Lookup(std::span(prompt_).first(513), {});
  const auto upload = *prefix->UploadToGpu({});
  ASSERT_TRUE(upload->Validate().ok());

  const auto other = NewGpuClient("other");
  const UploadedPages pages(*upload, 512);
  const auto published = other->PublishFromGpu(pages, std::span(prompt_).first(512), {});
  ASSERT_TRUE(published.ok()) << published.status();
  EXPECT_EQ(published->pages_added, 8u);
  EXPECT_EQ(published->tail_pages, 2u);
  EXPECT_EQ(HostImages(other.get(), 513), images);
  ExpectSamePages(*LookupOnGpu(other.get(), 513), images);

  // Nothing is launched over what is not there, or not of these rows: all goes on after it.
  const auto refuse = [&](const UploadedPages& bad, const char* words) {
    const absl::Status status =
        other->PublishFromGpu(bad, E2ePrompt(/*seed=*/77, 512), {}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(words));
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  };
  UploadedPages foreign(*upload, 512);
  foreign.MovePage(PageIdx(3), images[3].data());
  refuse(foreign, "page 3: address");
  foreign.MovePage(PageIdx(3), upload->Page(PageIdx(3), PageEncoding::kInt2) + 8);
  refuse(foreign, "is not a multiple of 16");
  UploadedPages others(*upload, 512);
  others.SetRows(&profile_->id(), {1, 1});
  refuse(others, "KV heads 1 + 1, the client of profile");
  const auto other_profile = MakeTestProfile({.geometry = profile_->geometry(), .seed = 2});
  others.SetRows(&other_profile->id(), {0, profile_->geometry().num_kv_heads});
  refuse(others, other_profile->id().Short().c_str());
  others.SetRows(&profile_->id(), {0, profile_->geometry().num_kv_heads});
  EXPECT_TRUE(other->PublishFromGpu(others, E2ePrompt(/*seed=*/77, 512), {}).ok());

  const UploadedPages shorter(*upload, 256);
  EXPECT_EQ(other->PublishFromGpu(shorter, std::span(prompt_).first(512), {}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(NewClient()->PublishFromGpu(pages, std::span(prompt_).first(512), {}).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace crumb
