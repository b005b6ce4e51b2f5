// SPDX-License-Identifier: Apache-2.0
//
// Sequences on a GPU that share prefixes through a real crumbd, beside sequences on the CPU that do
// the same. Needs a GPU.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/client/e2e/gpu_client_fixture.h"
#include "tests/client/gpu/gpu_scene.h"

namespace crumb {
namespace {

using testing::HasSubstr;
using Live = GpuScene::Live;
using Member = GpuScene::Member;

class GpuSequenceClientTest : public GpuClientTest {
 protected:
  GpuSequenceClientTest() {
    // Both sides have the same rows and codes, bit for bit.
    profile_ = MakeExactProfile(profile_->geometry(), profile_->windows());
  }

  GpuSceneOptions SceneOptions(HeadRange heads = {}) const {
    return {.profile = profile_,
            .heads = heads,
            .keeps_outputs_rotated = true,
            .out_type = ElementType::kFloat32,
            .tolerance = 0.004};
  }
  // A sequence whose CPU side has adopted the published prefix from host memory.
  std::unique_ptr<Live> NewReader(const GpuScene& scene, uint32_t seed, Client* on_host) {
    auto reader = scene.NewLive(seed);
    auto prefix = on_host->Lookup(std::span(prompt_).first(513), {});
    EXPECT_TRUE(prefix.ok()) << prefix.status();
    EXPECT_TRUE(reader->cpu->Adopt(*prefix).ok());
    EXPECT_EQ(reader->cpu->length(), 512u);
    return reader;
  }
  // A chunk and then tokens, further than the adopted window.
  static void Grow(GpuScene* scene, Live* reader) {
    ASSERT_NO_FATAL_FAILURE(scene->Step(reader, 100));
    for (int i = 0; i < 160; ++i) {
      ASSERT_NO_FATAL_FAILURE(scene->Step(reader, 1));
    }
    ASSERT_NO_FATAL_FAILURE(scene->ExpectSamePages(*reader));
  }
};

TEST_F(GpuSequenceClientTest, PrefixInTheDaemonsGpuMemoryIsAdoptedInPlace) {
  StartGpuDaemon();
  const auto client = NewGpuClient();
  const auto on_host = NewClient();
  Publish(client.get(), 512);
  const auto prefix = LookupOnGpu(client.get(), 513);
  GpuScene scene(SceneOptions());
  const auto reader = NewReader(scene, 1, on_host.get());
  ASSERT_TRUE(reader->gpu->Adopt(prefix).ok());
  EXPECT_EQ(reader->gpu->length(), 512u);
  EXPECT_EQ(reader->gpu->Page(PageIdx(3), PageEncoding::kInt2),
            prefix->GpuPage(PageIdx(3), PageEncoding::kInt2));
  EXPECT_EQ(prefix->copied_bytes(), 0u);
  Grow(&scene, reader.get());
}

TEST_F(GpuSequenceClientTest, PrefixInHostMemoryIsAdoptedWhileItsLayersAreOnTheirWay) {
  StartDaemon();
  const auto client = NewGpuClient();
  const auto on_host = NewClient();
  Publish(client.get(), 512);
  GpuScene scene(SceneOptions());
  const auto graph = scene.Capture(1);
  for (const bool is_replayed : {false, true}) {
    const std::shared_ptr<PrefixHandle> prefix =
        *client->Lookup(std::span(prompt_).first(513), {.on_gpu = true});
    const auto reader = NewReader(scene, 2, on_host.get());
    EXPECT_EQ(reader->gpu->Adopt(prefix).code(), absl::StatusCode::kFailedPrecondition)
        << "without an upload it is not on the GPU";
    auto upload = prefix->UploadToGpu({.layers_per_group = 1});
    ASSERT_TRUE(upload.ok()) << upload.status();
    ASSERT_TRUE(reader->gpu->Adopt(prefix, *std::move(upload)).ok());
    const std::vector<Member> members = {{reader.get(), 1}};
    if (is_replayed) {
      ASSERT_NO_FATAL_FAILURE(scene.Replay(members, graph.get()));
    }
    Grow(&scene, reader.get());
  }
}

TEST_F(GpuSequenceClientTest, RankAdoptsItsHeads) {
  StartDaemon();
  Publish(NewClient().get(), 512);
  const auto options = [&](int gpu) {
    return ClientOptions{
        .address = daemon_->address(), .profile = profile_, .heads = {1, 1}, .gpu = gpu};
  };
  const auto client = *Client::Create(options(0));
  const auto on_host = *Client::Create(options(-1));
  ASSERT_TRUE(client->WaitAttached(absl::Seconds(20)).ok());
  ASSERT_TRUE(on_host->WaitAttached(absl::Seconds(20)).ok());
  GpuScene scene(SceneOptions({1, 1}));
  const auto reader = NewReader(scene, 3, on_host.get());
  const std::shared_ptr<PrefixHandle> prefix = *client->Lookup(std::span(prompt_).first(513), {});
  // Of a rank that has both heads the pages lack one; and one lookup's upload is not another's.
  GpuScene of_both(SceneOptions());
  const auto refuse = [&](GpuSequence* sequence, const std::shared_ptr<PrefixHandle>& of_upload,
                          const char* words) {
    const absl::Status status = sequence->Adopt(prefix, *of_upload->UploadToGpu({}));
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(words));
    EXPECT_EQ(sequence->length(), 0u);
  };
  refuse(of_both.NewSequence().get(), prefix, "has KV heads 1 + 1 of each page, the pool 0 + 2");
  const std::shared_ptr<PrefixHandle> other = *client->Lookup(std::span(prompt_).first(257), {});
  refuse(reader->gpu.get(), other, "the upload is of another prefix");
  ASSERT_TRUE(reader->gpu->Adopt(prefix, *prefix->UploadToGpu({})).ok());
  Grow(&scene, reader.get());
}

TEST_F(GpuSequenceClientTest, SequenceIsPublishedFromTheGpuAsFromTheCpu) {
  StartGpuDaemon();
  const auto client = NewGpuClient();
  GpuScene scene(SceneOptions());
  const auto live = scene.NewLive(4);
  ASSERT_TRUE(live->gpu->RetainTail(512).ok());
  ASSERT_TRUE(live->cpu->RetainTail(512).ok());
  for (const uint32_t tokens : {200u, 200u, 200u, 64u}) {
    ASSERT_NO_FATAL_FAILURE(scene.Step(live.get(), tokens));
  }
  const auto published = client->PublishFromGpu(*live->gpu, std::span(prompt_).first(512), {});
  ASSERT_TRUE(published.ok()) << published.status();
  EXPECT_EQ(published->pages_added, 8u);
  EXPECT_EQ(published->tail_pages, 2u);
  const auto images = HostImages(client.get(), 513);
  ASSERT_EQ(images.size(), 8u);
  for (uint32_t page = 0; page < 8; ++page) {
    std::vector<std::byte> expected(images[page].size());
    const PageEncoding encoding = page == 0 ? PageEncoding::kBf16 : PageEncoding::kInt2;
    ASSERT_TRUE(live->cpu->ExportPage(PageIdx(page), encoding, expected).ok());
    EXPECT_TRUE(images[page] == expected) << "page " << page;
  }
  // And one that has adopted it publishes what it has added.
  const auto prefix = LookupOnGpu(client.get(), 513);
  const auto on_host = NewClient();
  const auto reader = NewReader(scene, 5, on_host.get());
  ASSERT_TRUE(reader->gpu->Adopt(prefix).ok());
  ASSERT_NO_FATAL_FAILURE(scene.Step(reader.get(), 200));
  const auto more = client->PublishFromGpu(*reader->gpu, std::span(prompt_).first(704), {});
  ASSERT_TRUE(more.ok()) << more.status();
  EXPECT_EQ(more->pages_added, 3u);
}

TEST_F(GpuSequenceClientTest, SequenceWithNanIsNotPublished) {
  StartGpuDaemon();
  const auto client = NewGpuClient();
  GpuScene scene(SceneOptions());
  const auto live = scene.NewLive(6);
  scene.spoilt = {.layer = 1, .seed = 6, .position = 70};
  const std::vector<Member> members = {{live.get(), 200}};
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(scene.Begin(members).ok());
    scene.EnqueueRows(members);
    scene.EnqueueLayers();
    ASSERT_TRUE(scene.batch().EndStep(scene.stream()).ok());
    scene.Wait();
  }
  const auto published = client->PublishFromGpu(*live->gpu, std::span(prompt_).first(384), {});
  EXPECT_EQ(published.status().code(), absl::StatusCode::kInvalidArgument) << published.status();
  EXPECT_THAT(std::string(published.status().message()), HasSubstr("K holds NaN or inf"));
  const auto missed = client->Lookup(std::span(prompt_).first(385), {});
  ASSERT_TRUE(missed.ok()) << missed.status();
  EXPECT_EQ((*missed)->num_pages(), 0u);
}

TEST_F(GpuSequenceClientTest, DaemonKilledUnderABatchIsAStatusAndOthersGoOn) {
  StartGpuDaemon();
  const auto client = NewGpuClient();
  const auto on_host = NewClient();
  Publish(client.get(), 512);
  const auto prefix = LookupOnGpu(client.get(), 513);
  GpuScene scene(SceneOptions());
  const auto alone = scene.NewLive(7);
  ASSERT_NO_FATAL_FAILURE(scene.Step(alone.get(), 250));
  auto reader = NewReader(scene, 8, on_host.get());
  ASSERT_TRUE(reader->gpu->Adopt(prefix).ok());
  std::vector<Member> both = {{alone.get(), 1}, {reader.get(), 1}};
  const auto graph = scene.Capture(2);
  ASSERT_NO_FATAL_FAILURE(scene.Replay(both, graph.get()));
  daemon_->Kill();
  WaitFor([&] { return !prefix->Validate().ok(); });
  // The step itself runs: the memory lives as long as it is mapped.
  ASSERT_TRUE(scene.Begin(both, graph->num_rows).ok());
  graph->Launch(scene.stream());
  ASSERT_TRUE(scene.batch().EndStep(scene.stream()).ok());
  scene.Wait();
  const absl::Status status = scene.batch().Validate();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("member 1: "));
  EXPECT_TRUE(alone->gpu->Validate().ok());
  reader = nullptr;
  const GpuPagePool::Usage usage = scene.pool().usage(PageEncoding::kBf16);
  EXPECT_LT(usage.num_pages - usage.num_free, 6u) << "what it held is free";
}

}  // namespace
}  // namespace crumb
