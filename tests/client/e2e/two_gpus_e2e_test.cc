// SPDX-License-Identifier: Apache-2.0
//
// A real crumbd whose arena is on one GPU, and an engine on another. Needs two GPUs.
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "crumb/gpu_sequence.h"
#include "tests/client/e2e/gpu_client_fixture.h"
#include "tests/client/e2e/uploaded_pages.h"
#include "tests/cuda/gpu/two_gpu_fixture.h"

namespace crumb {
namespace {

using testing::HasSubstr;

constexpr int kOtherGpu = 1;

class TwoGpusTest : public TwoGpuFixture<GpuClientTest> {
 protected:
  void ExpectCurrentGpuIsTheCallers() {
    int current = -1;
    CRUMB_EXPECT_CUDA(cudaGetDevice(&current));
    EXPECT_EQ(current, 0);
  }
};

TEST_F(TwoGpusTest, EngineOnAnotherGpuThanTheDaemonsReadsAndPublishesByWayOfHostMemory) {
  StartGpuDaemon();
  const auto neighbour = NewGpuClient();
  Publish(neighbour.get(), 512);
  const auto images = HostImages(neighbour.get(), 513);

  const auto client = NewGpuClient("default", kOtherGpu);
  EXPECT_FALSE(client->state().reads_gpu_pages);
  EXPECT_THAT(client->state().gpu_note, HasSubstr("another GPU's memory"));
  const auto prefix = *client->Lookup(std::span(prompt_).first(513), {.on_gpu = true});
  ASSERT_EQ(prefix->num_pages(), 8u);
  EXPECT_EQ(prefix->GpuPage(PageIdx(3), PageEncoding::kInt2), nullptr);
  const auto upload = prefix->UploadToGpu({.layers_per_group = 1});
  ASSERT_TRUE(upload.ok()) << upload.status();
  ExpectCurrentGpuIsTheCallers();
  const TestStream of_daemons_gpu;
  const absl::Status refused_stream = (*upload)->DelayUntilLayer(0, of_daemons_gpu.get());
  EXPECT_EQ(refused_stream.code(), absl::StatusCode::kInvalidArgument) << refused_stream;
  ASSERT_TRUE((*upload)->Validate().ok()) << (*upload)->Validate();
  for (uint32_t page = 0; page < 8; ++page) {
    const PageEncoding encoding = page == 0 ? PageEncoding::kBf16 : PageEncoding::kInt2;
    const std::byte* const image = (*upload)->Page(PageIdx(page), encoding);
    cudaPointerAttributes attributes = {};
    CRUMB_EXPECT_CUDA(cudaPointerGetAttributes(&attributes, image));
    EXPECT_EQ(attributes.device, kOtherGpu) << "page " << page;
    EXPECT_EQ(Download(image, encoding), images[page]) << "page " << page;
  }

  // A pool on the daemon's GPU could not read them.
  const auto pool =
      GpuPagePool::Create({.profile = profile_, .gpu = 0, .int2_pages = 1, .bf16_pages = 1});
  ASSERT_TRUE(pool.ok()) << pool.status();
  {
    const auto sequence = *GpuSequence::Create({.pool = pool->get()});
    const std::shared_ptr<GpuUpload> again = *prefix->UploadToGpu({});
    const absl::Status refused = sequence->Adopt(prefix, again);
    EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("on GPU 1, the pool on GPU 0"));
  }

  // And back: pages of that GPU's memory, for the tenant's engines on both.
  const auto publisher = NewGpuClient("other", kOtherGpu);
  const UploadedPages pages(**upload, 512);
  const auto published = publisher->PublishFromGpu(pages, std::span(prompt_).first(512), {});
  ASSERT_TRUE(published.ok()) << published.status();
  EXPECT_EQ(published->pages_added, 8u);
  ExpectCurrentGpuIsTheCallers();
  EXPECT_EQ(HostImages(publisher.get(), 513), images);
  ExpectSamePages(*LookupOnGpu(NewGpuClient("other").get(), 513), images);

  // A client of the wrong GPU names both.
  const absl::Status wrong =
      neighbour->PublishFromGpu(pages, E2ePrompt(/*seed=*/77, 512), {}).status();
  EXPECT_EQ(wrong.code(), absl::StatusCode::kInvalidArgument) << wrong;
  EXPECT_THAT(std::string(wrong.message()),
              HasSubstr("memory of GPU 1, it must be in that of GPU 0"));
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

}  // namespace
}  // namespace crumb
