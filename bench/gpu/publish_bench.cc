// SPDX-License-Identifier: Apache-2.0
//
// What it costs to publish pages in BF16, which the daemon demotes: on its GPU, and on its CPU, as
// it does without a GPU arena. Of each: the commit alone, of pages that are staged already, which
// is the daemon's work; and a whole publish from an engine's GPU memory. Then how long until all
// of it is read in place on the GPU.
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bench/gpu/bf16_pages.h"
#include "bench/gpu/service_scene.h"
#include "client/session/control_plane.h"
#include "client/transport/map_transport.h"
#include "proto/page/page_header.h"
#include "tests/support/daemon_process.h"
#include "tests/support/test_profile.h"

namespace crumb::bench {
namespace {

constexpr uint32_t kStepPages = 27;  // A step of the library: 256 MiB.
constexpr uint32_t kGpuPages = 217;  // 2.05 GB in BF16.
constexpr uint32_t kCpuPages = 55;

// Speaks to the daemon without the library, to time the commit alone.
class Stager {
 public:
  Stager(const std::string& address, const std::shared_ptr<const Profile>& profile)
      : control_(ControlPlane::Create(address)) {
    const AttachedSession session = Must(control_->Attach({.client_name = "stager",
                                                           .tenant = "default",
                                                           .profile = profile,
                                                           .heads = {0, kGeometry.num_kv_heads}}));
    map_ = Must(MapTransport::Connect({}, session.info, Soon()));
  }

  // Milliseconds of a commit of kStepPages pages that nobody has published.
  double Commit(std::span<const uint32_t> tokens, std::span<const std::byte> image) {
    const MissingPages missing = Must(control_->BeginPublish("", tokens, Soon()));
    const auto checksums = HeadChecksums(kGeometry, PageEncoding::kBf16,
                                         HeadRange{0, kGeometry.num_kv_heads}.Mask(), image);
    const auto staging = Must(map_->AcquireStaging(kStepPages * image.size(), Soon()));
    CommitParams params{.publish = missing.publish, .staged = {}};
    for (uint32_t page = 0; page < kStepPages; ++page) {
      const size_t offset = page * image.size();
      std::memcpy(staging.data() + offset, image.data(), image.size());
      params.staged.push_back(
          {.page = PageIdx(page),
           .encoding = PageEncoding::kBf16,
           .offset = offset,
           .head_crc32c = {checksums.begin(), checksums.begin() + kGeometry.num_kv_heads}});
    }
    const absl::Time began = Now();
    Must(control_->CommitPublish(params, Soon()));
    const double ms = MsSince(began);
    map_->ReleaseStaging(false);
    return ms;
  }

 private:
  const std::unique_ptr<ControlPlane> control_;
  std::unique_ptr<MapTransport> map_;
};

// From the publish's return until a lookup finds every page on the GPU.
double MsUntilOnGpu(Client* client, std::span<const uint32_t> prompt, uint32_t num_pages) {
  const absl::Time began = Now();
  while (!IsOnGpu(*Lookup(client, prompt), num_pages)) {
    CRUMB_CHECK(Now() - began < absl::Seconds(30), "the daemon copies pages to the GPU");
  }
  return MsSince(began);
}

void Run(const std::string& codec_name, CodecId codec, bool on_gpu, int rounds) {
  Check(cudaFree(nullptr));  // The first use of the GPU in a process takes 0.15 s.
  const auto profile =
      MakeTestProfile({.geometry = kGeometry, .codec = codec, .rotation_per_layer = true});
  std::vector<std::string> flags = {"--store.capacity=16GiB", "--demote.threads=8"};
  if (on_gpu) {
    flags.insert(flags.end(), {"--store.gpu_arena=8GiB", "--store.gpu_chunk=128MiB"});
  }
  const auto daemon = Must(DaemonProcess::Start({.flags = flags}));
  const std::vector<std::byte> image = PageOfRows();
  const std::string shape = codec_name + (on_gpu ? ", on the GPU" : ", on 8 threads");
  Stager stager(daemon->address(), profile);
  Times first;  // Brings the profile to the device.
  Times commits;
  for (int round = 0; round <= rounds; ++round) {
    const auto prompt = Prompt(kStepPages, 1 + static_cast<uint32_t>(round));
    const double ms =
        stager.Commit(std::span(prompt).first(size_t{kStepPages} * kPageTokens), image);
    (round == 0 ? first : commits).ms.push_back(ms);
  }
  const size_t step_bytes = kStepPages * image.size();
  Print("commit_bf16", shape + ", first", std::move(first), step_bytes);
  Print("commit_bf16", shape, std::move(commits), step_bytes);

  const uint32_t num_pages = on_gpu ? kGpuPages : kCpuPages;
  const Bf16Pages pages(image, num_pages);
  const auto client = NewClient(daemon->address(), profile);
  Times publishes;
  Times waits;
  for (int round = 0; round < (on_gpu ? 3 : 1); ++round) {
    const auto prompt = Prompt(num_pages, 100 + static_cast<uint32_t>(round));
    const absl::Time began = Now();
    Must(client->PublishFromGpu(pages, std::span(prompt).first(pages.length()),
                                {.timeout = absl::Seconds(60)}));
    publishes.ms.push_back(MsSince(began));
    if (on_gpu) {
      waits.ms.push_back(MsUntilOnGpu(client.get(), prompt, num_pages));
    }
  }
  Print("publish_bf16", shape, std::move(publishes), num_pages * image.size());
  if (on_gpu) {
    Print("until_on_gpu", shape, std::move(waits), 0);
  }
}

}  // namespace
}  // namespace crumb::bench

int main() {
  using crumb::CodecId;
  crumb::bench::Run("oscar-int2", CodecId::kOscarInt2, /*on_gpu=*/true, 7);
  crumb::bench::Run("oscar-int2-tilted", CodecId::kOscarInt2Tilted, /*on_gpu=*/true, 7);
  crumb::bench::Run("oscar-int2", CodecId::kOscarInt2, /*on_gpu=*/false, 2);
  crumb::bench::Run("oscar-int2-tilted", CodecId::kOscarInt2Tilted, /*on_gpu=*/false, 2);
}
