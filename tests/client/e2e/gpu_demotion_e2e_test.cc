// SPDX-License-Identifier: Apache-2.0
//
// Pages that engines publish in BF16, demoted on the daemon's GPU. Needs a GPU.
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "crumb/cuda/demote.h"
#include "proto/base/bfloat16.h"
#include "tests/client/e2e/gpu_client_fixture.h"
#include "tests/support/exposition.h"
#include "tests/support/raw_http.h"

namespace crumb {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Optional;

constexpr uint32_t kNumPages = 8;

// An engine's pages, all in BF16 and in its GPU's memory.
class Bf16Pages : public GpuPages {
 public:
  explicit Bf16Pages(const Profile& profile) {
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    for (uint32_t page = 0; page < kNumPages; ++page) {
      std::vector<std::byte> image(profile.geometry().PageBytes(PageEncoding::kBf16));
      for (size_t i = 0; i < image.size(); i += sizeof(BFloat16)) {
        const BFloat16 value = BFloat16::FromFloat(normal(random));
        std::memcpy(&image[i], &value, sizeof(value));
      }
      images_.push_back(std::move(image));
      on_device_.emplace_back(images_.back());
    }
  }

  uint32_t length() const override { return kNumPages * kPageTokens; }
  const std::byte* Page(PageIdx page, PageEncoding encoding) const override {
    return encoding == PageEncoding::kBf16 ? on_device_[page.value()].data() : nullptr;
  }
  const std::vector<std::byte>& image(uint32_t page) const { return images_[page]; }
  void Set(uint32_t page, size_t offset, BFloat16 value) {
    std::memcpy(&images_[page][offset], &value, sizeof(value));
    on_device_[page] = DeviceBuffer<std::byte>(images_[page]);
  }

 private:
  std::vector<std::vector<std::byte>> images_;
  std::vector<DeviceBuffer<std::byte>> on_device_;
};

class GpuDemotionTest : public GpuClientTest {
 protected:
  void UseCodec(CodecId codec) {
    profile_ = MakeTestProfile({.geometry = profile_->geometry(), .codec = codec, .seed = 1});
  }
  absl::StatusOr<PublishResult> PublishRows(Client* client, const Bf16Pages& pages) {
    return client->PublishFromGpu(pages, std::span(prompt_).first(pages.length()), {});
  }
  std::string Metric(const std::string& series) const {
    const auto port = static_cast<uint16_t>(daemon_->ReadyNumber("metrics_port"));
    return SampleOf(AskHttp(port, "GET /metrics HTTP/1.1\r\nHost: crumbd\r\n\r\n"), series)
        .value_or("none");
  }
  std::string DemotedBy(const std::string& by) const {
    return Metric("crumb_write_page_seconds_count{by=\"" + by + "_demotion\"}");
  }
  // Codes and scales of V in the first head block.
  std::vector<std::byte> Values(std::span<const std::byte> image) const {
    const Int2HeadBlock block = profile_->geometry().Int2Block();
    const auto codes = image.subspan(block.value_codes_offset(), block.value_codes_bytes());
    const auto meta = image.subspan(block.value_meta_offset(), Int2HeadBlock::meta_bytes());
    std::vector<std::byte> values(codes.begin(), codes.end());
    values.insert(values.end(), meta.begin(), meta.end());
    return values;
  }
  std::vector<std::byte> DemotedOnCpu(uint32_t page, const Bf16Pages& pages) const {
    std::vector<std::byte> int2(profile_->geometry().PageBytes(PageEncoding::kInt2));
    const auto demoted = DemotePage(*profile_, {0, profile_->geometry().num_kv_heads},
                                    page * kPageTokens, pages.image(page), int2);
    EXPECT_TRUE(demoted.ok()) << demoted;
    return int2;
  }
};

TEST_F(GpuDemotionTest, PagesAreMadeOnTheGpuAndAreThereWhenThePublishReturns) {
  StartGpuDaemon();
  EXPECT_THAT(daemon_->Log(), HasSubstr("pages that come in BF16 are demoted there"));
  const auto client = NewGpuClient();
  const Bf16Pages pages(*profile_);
  const auto published = PublishRows(client.get(), pages);
  ASSERT_TRUE(published.ok()) << published.status();
  EXPECT_EQ(published->pages_added, kNumPages);
  // At once: nothing is copied up afterwards but BF16 of the sink and the tail.
  const auto prefix = client->Lookup(std::span(prompt_).first(513), {.on_gpu = true});
  ASSERT_TRUE(prefix.ok()) << prefix.status();
  const auto images = HostImages(client.get(), 513);
  ASSERT_EQ(images.size(), kNumPages);
  EXPECT_EQ(images[0], pages.image(0));
  for (uint32_t page = 1; page < kNumPages; ++page) {
    const std::byte* const on_gpu = (*prefix)->GpuPage(PageIdx(page), PageEncoding::kInt2);
    ASSERT_NE(on_gpu, nullptr) << "page " << page;
    EXPECT_EQ(images[page], DemotedOnCpu(page, pages)) << "page " << page;
    EXPECT_EQ(Download(on_gpu, PageEncoding::kInt2), images[page]) << "page " << page;
  }
  EXPECT_EQ(DemotedBy("gpu"), "7");
  EXPECT_EQ(DemotedBy("cpu"), "0");
  EXPECT_EQ(Metric("crumb_gpu_demotion_failures_total"), "0");
  // The tail keeps its rows.
  const auto on_host = *client->Lookup(std::span(prompt_).first(513), {});
  std::vector<std::byte> tail(pages.image(7).size());
  ASSERT_TRUE(on_host->CopyPage(PageIdx(7), PageEncoding::kBf16, tail).ok());
  EXPECT_EQ(tail, pages.image(7));
}

TEST_F(GpuDemotionTest, EveryCodecIsDemotedThereAndBothOfTwoPublishersSucceed) {
  for (const CodecId codec : {CodecId::kOscarInt2Aware, CodecId::kOscarInt2Tilted}) {
    SCOPED_TRACE(static_cast<int>(codec));
    UseCodec(codec);
    StartGpuDaemon();
    const auto first = NewGpuClient();
    const auto second = NewGpuClient();
    const Bf16Pages pages(*profile_);
    ASSERT_TRUE(PublishRows(first.get(), pages).ok());
    const auto again = PublishRows(second.get(), pages);
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(again->pages_present, kNumPages);
    EXPECT_EQ(DemotedBy("gpu"), "7");
    const auto images = HostImages(first.get(), 513);
    ExpectSamePages(*LookupOnGpu(second.get(), 513), images);
    // Values are rounded alike under every codec, and keys to the same quality.
    EXPECT_EQ(Values(images[3]), Values(DemotedOnCpu(3, pages)));
  }
}

TEST_F(GpuDemotionTest, RowsThatAreNotFiniteAreRefusedByNameAndTheNextPublishIsFine) {
  StartGpuDaemon();
  const auto client = NewGpuClient();
  Bf16Pages pages(*profile_);
  const Geometry& geometry = profile_->geometry();
  const size_t offset = geometry.HeadBlockOffset(PageEncoding::kBf16, 1, 1) +
                        geometry.Bf16Block().value_offset() + 10 * geometry.value_dim * 2;
  const BFloat16 before = BFloat16::FromFloat(0.5f);
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    pages.Set(4, offset, BFloat16::FromFloat(bad));
    const absl::Status status = PublishRows(client.get(), pages).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("staged page 4"), HasSubstr("V holds"), HasSubstr("layer 1"),
                      HasSubstr("KV head 1"), HasSubstr("token 266")));
  }
  EXPECT_EQ(Metric("crumb_gpu_demotion_failures_total"), "0");
  pages.Set(4, offset, before);
  ASSERT_TRUE(PublishRows(client.get(), pages).ok());
  ExpectSamePages(*LookupOnGpu(client.get(), 513), HostImages(client.get(), 513));
}

TEST_F(GpuDemotionTest, WithoutRoomInTheArenaPagesAreMadeThereAllTheSame) {
  // One chunk, which the sink's BF16 takes at the promoter's, or the first page's INT2 at the
  // demotion's: whoever has none is copied, or left out.
  StartGpuDaemon({"--store.gpu_arena=2MiB", "--store.gpu_chunk=2MiB"});
  const auto client = NewGpuClient();
  const Bf16Pages pages(*profile_);
  ASSERT_TRUE(PublishRows(client.get(), pages).ok());
  const auto images = HostImages(client.get(), 513);
  for (uint32_t page = 1; page < kNumPages; ++page) {
    EXPECT_EQ(images[page], DemotedOnCpu(page, pages)) << "page " << page;
  }
  EXPECT_EQ(DemotedBy("gpu"), "7");
}

TEST_F(GpuDemotionTest, EngineKilledWhileItPublishesLeavesTheGpuAndTheStoreAsTheyWere) {
  StartGpuDaemon({"--store.gpu_arena=64MiB", "--store.gpu_chunk=4MiB", "--store.quarantine=100ms"});
  for (int round = 0; round < 3; ++round) {
    auto engine = EngineProcess::Start(daemon_->address());
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine->Send("churn 100");
    EXPECT_THAT(engine->ReadLine(), HasSubstr("published"));
    engine->Kill();
  }
  EXPECT_TRUE(StatusBecomes("\"leased_pages\": 0")) << status_;
  const auto client = NewGpuClient();
  const Bf16Pages pages(*profile_);
  ASSERT_TRUE(PublishRows(client.get(), pages).ok());
  ExpectSamePages(*LookupOnGpu(client.get(), 513), HostImages(client.get(), 513));
  EXPECT_EQ(Metric("crumb_gpu_demotion_failures_total"), "0");
}

}  // namespace
}  // namespace crumb
