// SPDX-License-Identifier: Apache-2.0
//
// A real crumbd with a GPU arena, and engines on the same GPU. Skips without a GPU.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

#include "tests/client/e2e/client_fixture.h"
#include "tests/client/e2e/engine_process.h"
#include "tests/client/e2e/gpu_prefix.h"
#include "tests/cuda/gpu/gpu_fixture.h"

namespace crumb {

class GpuClientTest : public GpuFixture<ClientTest> {
 protected:
  void StartGpuDaemon(std::vector<std::string> flags = {"--store.gpu_arena=64MiB",
                                                        "--store.gpu_chunk=4MiB"}) {
    StartDaemon(std::move(flags));
  }
  std::unique_ptr<Client> NewGpuClient(std::string tenant = "default", int gpu = 0) {
    auto client = Client::Create({.address = daemon_->address(),
                                  .tenant = std::move(tenant),
                                  .profile = profile_,
                                  .data_plane = DataPlane::kMap,
                                  .reconnect_backoff_max = absl::Milliseconds(200),
                                  .gpu = gpu});
    EXPECT_TRUE(client.ok()) << client.status();
    EXPECT_TRUE((*client)->WaitAttached(absl::Seconds(20)).ok())
        << (*client)->WaitAttached(absl::ZeroDuration());
    return *std::move(client);
  }
  void Publish(Client* client, uint32_t num_tokens) {
    const auto published =
        client->Publish(*Prefill(num_tokens), std::span(prompt_).first(num_tokens), {});
    ASSERT_TRUE(published.ok()) << published.status();
  }
  // Prompts 100 to 129, more than an arena of 4 MiB on the GPU holds.
  void PublishUntilCopiesSpill(Client* client) {
    const auto sequence = Prefill(1024);
    for (uint32_t seed = 100; seed < 130; ++seed) {
      ASSERT_TRUE(client->Publish(*sequence, E2ePrompt(seed, 1024), {}).ok());
    }
    WaitFor([&] {
      return StatusBecomes("spilled_copies") &&
             status_.find("\"spilled_copies\": 0\n") == std::string::npos;
    });
  }
  // All of whose pages are on the GPU.
  std::shared_ptr<PrefixHandle> LookupOnGpu(Client* client, uint32_t num_tokens) {
    std::shared_ptr<PrefixHandle> prefix;
    WaitFor([&] {
      auto found = client->Lookup(std::span(prompt_).first(num_tokens), {.on_gpu = true});
      EXPECT_TRUE(found.ok()) << found.status();
      prefix = found.value_or(nullptr);
      return prefix == nullptr || PagesOnGpu(*prefix, *profile_) == prefix->num_pages();
    });
    return prefix;
  }
  std::vector<std::byte> Download(const std::byte* device, PageEncoding encoding) {
    std::vector<std::byte> image(profile_->geometry().PageBytes(encoding));
    CRUMB_EXPECT_CUDA(cudaMemcpy(image.data(), device, image.size(), cudaMemcpyDeviceToHost));
    return image;
  }
  // As engines without a GPU get them: the sink in BF16, the rest in INT2.
  std::vector<std::vector<std::byte>> HostImages(Client* client, uint32_t num_tokens) {
    std::vector<std::vector<std::byte>> images;
    auto prefix = client->Lookup(std::span(prompt_).first(num_tokens), {});
    EXPECT_TRUE(prefix.ok()) << prefix.status();
    for (uint32_t page = 0; prefix.ok() && page < (*prefix)->num_pages(); ++page) {
      const PageEncoding encoding = page == 0 ? PageEncoding::kBf16 : PageEncoding::kInt2;
      images.emplace_back(profile_->geometry().PageBytes(encoding));
      EXPECT_TRUE((*prefix)->CopyPage(PageIdx(page), encoding, images.back()).ok());
    }
    return images;
  }
  void ExpectSamePages(const PrefixHandle& prefix,
                       const std::vector<std::vector<std::byte>>& images) {
    ASSERT_EQ(images.size(), prefix.num_pages());
    for (uint32_t page = 0; page < images.size(); ++page) {
      const PageEncoding encoding = page == 0 ? PageEncoding::kBf16 : PageEncoding::kInt2;
      EXPECT_EQ(Download(prefix.GpuPage(PageIdx(page), encoding), encoding), images[page])
          << "page " << page;
    }
  }
  static absl::StatusOr<EngineProcess> StartEngine(const std::string& address) {
    return EngineProcess::Start(address, "map", "gpu_engine");
  }
};

}  // namespace crumb
