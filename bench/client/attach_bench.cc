// SPDX-License-Identifier: Apache-2.0
//
// An engine attaches to a published prefix of 8,192 tokens of an 8B model (128 pages, 36 layers,
// 8 KV heads, head_dim 128: 180 MB) in a real crumbd over Unix sockets: lookup, lease and map in
// one call, the release, and copies out of the map beside plain memcpy. Wall clock; p50 of many.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bench/support/figure.h"
#include "bench/support/must.h"
#include "client/session/control_plane.h"
#include "client/transport/map_transport.h"
#include "crumb/client.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/crc32c.h"
#include "proto/base/streaming_copy.h"
#include "tests/support/daemon_process.h"
#include "tests/support/test_profile.h"

namespace crumb {
namespace {

constexpr uint32_t kPages = 128;
// A user's message follows the prefix, so that its last page need not be in BF16.
constexpr uint32_t kPromptTokens = kPages * kPageTokens + 300;
constexpr int kAttaches = 2000;
constexpr int kCopyRounds = 15;

absl::Time Now() {
  return Clock::System().Now();
}
absl::Time Soon() {
  return Now() + absl::Seconds(60);
}

double Microseconds(absl::Duration duration) {
  return absl::ToDoubleMicroseconds(duration);
}

double Quantile(std::vector<double> values, double q) {
  const auto at = static_cast<size_t>(q * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), values.begin() + static_cast<ptrdiff_t>(at), values.end());
  return values[at];
}

std::vector<uint32_t> Prompt() {
  std::vector<uint32_t> tokens(kPromptTokens);
  for (uint32_t i = 0; i < kPromptTokens; ++i) {
    tokens[i] = i * 7919 % 50'021;
  }
  return tokens;
}

// Publishes the prefix without computing it: any codes will do, and rows of zeros.
class Publishing {
 public:
  Publishing(const std::string& address, std::shared_ptr<const Profile> profile)
      : profile_(std::move(profile)), control_(ControlPlane::Create(address)) {
    session_ = Must(control_->Attach({.client_name = "attach_bench",
                                      .tenant = "default",
                                      .profile = profile_,
                                      .heads = {0, profile_->geometry().num_kv_heads}}));
  }

  void Run(std::span<const uint32_t> tokens) {
    const auto map = Must(MapTransport::Connect({}, session_.info, Soon()));
    const MissingPages missing = Must(control_->BeginPublish("", tokens, Soon()));
    const Geometry& geometry = profile_->geometry();
    CommitParams params{.publish = missing.publish, .staged = {}};
    const std::span<std::byte> staging = Must(map->AcquireStaging(
        geometry.PageBytes(PageEncoding::kBf16) + kPages * geometry.PageBytes(PageEncoding::kInt2),
        Soon()));
    uint64_t offset = 0;
    for (uint32_t page = 0; page < kPages; ++page) {
      const PageEncoding encoding = page == 0 ? PageEncoding::kBf16 : PageEncoding::kInt2;
      const std::span<std::byte> image = staging.subspan(offset, geometry.PageBytes(encoding));
      Fill(page, image);
      const auto checksums =
          HeadChecksums(geometry, encoding, HeadRange{0, geometry.num_kv_heads}.Mask(), image);
      params.staged.push_back(
          {.page = PageIdx(page),
           .encoding = encoding,
           .offset = offset,
           .head_crc32c = {checksums.begin(), checksums.begin() + geometry.num_kv_heads}});
      offset += image.size();
    }
    Must(control_->CommitPublish(params, Soon()));
    map->ReleaseStaging(false);
  }

  // Round trips of a release, told to the daemon and answered, in microseconds.
  std::vector<double> MeasureReleases(std::span<const uint32_t> prompt, int count) {
    std::vector<double> releases;
    for (int i = 0; i < count; ++i) {
      const FoundPrefix found =
          Must(control_->Lookup({.context_key = "", .tokens = prompt}, Soon()));
      const absl::Time began = Now();
      Must(control_->ReleaseLeases({&found.lease, 1}, Soon()));
      releases.push_back(Microseconds(Now() - began));
    }
    return releases;
  }

 private:
  static void Fill(uint32_t page, std::span<std::byte> image) {
    if (page == 0) {
      std::memset(image.data(), 0, image.size());
      return;
    }
    for (size_t at = 0; at + 8 <= image.size(); at += 8) {
      // Where it stands for two fp16, these are positive and finite, as the daemon wants scales.
      const uint64_t word = (at + page) * 0x9e3779b97f4a7c15u & 0x3fff3fff3fff3fffu;
      std::memcpy(image.data() + at, &word, sizeof(word));
    }
  }

  const std::shared_ptr<const Profile> profile_;
  const std::unique_ptr<ControlPlane> control_;
  AttachedSession session_;
};

std::unique_ptr<Client> NewClient(const std::string& address,
                                  const std::shared_ptr<const Profile>& profile) {
  auto client =
      Must(Client::Create({.address = address, .profile = profile, .data_plane = DataPlane::kMap}));
  Must(client->WaitAttached(absl::Seconds(30)));
  return client;
}

void MeasureAttach(Client* client, std::span<const uint32_t> prompt) {
  std::vector<double> misses;
  std::vector<double> attaches;
  std::vector<double> handles;
  const std::vector<uint32_t> unknown(prompt.size(), 1);
  for (int i = 0; i < kAttaches; ++i) {
    absl::Time began = Now();
    Must(client->Lookup(unknown, {}));
    misses.push_back(Microseconds(Now() - began));
    began = Now();
    auto prefix = Must(client->Lookup(prompt, {}));
    attaches.push_back(Microseconds(Now() - began));
    CRUMB_CHECK(prefix->num_pages() == kPages && prefix->copied_bytes() == 0, "not what was sent");
    began = Now();
    prefix = nullptr;
    handles.push_back(Microseconds(Now() - began));
  }
  const double floor = Quantile(misses, 0.5);
  const std::string floor_name = "lookup of as many tokens that finds nothing";
  bench::Register("attach/p50", {.value = Quantile(attaches, 0.5),
                                 .limit = floor,
                                 .target = 500,
                                 .unit = "us",
                                 .limit_name = floor_name,
                                 .better = bench::Better::kLower});
  bench::Register("attach/p99", {.value = Quantile(attaches, 0.99),
                                 .limit = Quantile(misses, 0.99),
                                 .target = 0,
                                 .unit = "us",
                                 .limit_name = floor_name + ", p99",
                                 .better = bench::Better::kLower});
  bench::Register("release/in_the_engine", {.value = Quantile(handles, 0.5),
                                            .limit = 0,
                                            .target = 200,
                                            .unit = "us",
                                            .limit_name = "",
                                            .better = bench::Better::kLower});
}

// The prefix's bytes in place, head range by head range as the checksums go.
std::vector<std::span<const std::byte>> Ranges(const PrefixHandle& prefix,
                                               const Geometry& geometry) {
  std::vector<std::span<const std::byte>> ranges;
  for (uint32_t page = 0; page < kPages; ++page) {
    const PageEncoding encoding = page == 0 ? PageEncoding::kBf16 : PageEncoding::kInt2;
    for (uint32_t head = 0; head < geometry.num_kv_heads; ++head) {
      ranges.emplace_back(prefix.HeadBlock(PageIdx(page), encoding, 0, head),
                          geometry.HeadRangeBytes(encoding));
    }
  }
  return ranges;
}

template <typename Copy>
double Rate(const std::vector<std::span<const std::byte>>& ranges,
            std::span<std::byte> target,
            const Copy& copy) {
  const absl::Time began = Now();
  size_t offset = 0;
  for (const auto& range : ranges) {
    copy(range, target.subspan(offset, range.size()));
    offset += range.size();
  }
  return static_cast<double>(offset) / absl::ToDoubleSeconds(Now() - began) / 1e9;
}

// The same by the public call, page by page.
double CopyPages(PrefixHandle* prefix, const Geometry& geometry, std::span<std::byte> target) {
  const absl::Time began = Now();
  size_t offset = 0;
  for (uint32_t page = 0; page < kPages; ++page) {
    const PageEncoding encoding = page == 0 ? PageEncoding::kBf16 : PageEncoding::kInt2;
    const size_t bytes = geometry.PageBytes(encoding);
    Must(prefix->CopyPage(PageIdx(page), encoding, target.subspan(offset, bytes)));
    offset += bytes;
  }
  return static_cast<double>(offset) / absl::ToDoubleSeconds(Now() - began) / 1e9;
}

void MeasureCopies(Client* client, std::span<const uint32_t> prompt, const Geometry& geometry) {
  const auto prefix = Must(client->Lookup(prompt, {}));
  Must(prefix->WaitForLayer(0));
  const auto mapped = Ranges(*prefix, geometry);
  size_t bytes = 0;
  for (const auto& range : mapped) {
    bytes += range.size();
  }
  // The yardstick reads private memory of the same shape, as touched as the map.
  std::vector<std::byte> own(bytes, std::byte{1});
  std::vector<std::byte> target(bytes, std::byte{2});
  std::vector<std::span<const std::byte>> private_ranges;
  for (size_t i = 0, offset = 0; i < mapped.size(); offset += mapped[i].size(), ++i) {
    private_ranges.push_back(std::span(own).subspan(offset, mapped[i].size()));
  }
  const auto plain = [](std::span<const std::byte> from, std::span<std::byte> to) {
    std::memcpy(to.data(), from.data(), from.size());
  };
  const auto streamed = [](std::span<const std::byte> from, std::span<std::byte> to) {
    StreamingCopy(from, to);
  };
  const auto checked = [](std::span<const std::byte> from, std::span<std::byte> to) {
    benchmark::DoNotOptimize(StreamingCopyWithCrc32c(from, to));
  };
  std::vector<double> yardstick;
  std::vector<double> copies;
  std::vector<double> by_page;
  std::vector<double> checks;
  for (int round = 0; round < kCopyRounds; ++round) {
    yardstick.push_back(Rate(private_ranges, target, plain));
    copies.push_back(Rate(mapped, target, streamed));
    by_page.push_back(CopyPages(prefix.get(), geometry, target));
    checks.push_back(Rate(mapped, target, checked));
  }
  const double limit = Quantile(yardstick, 0.5);
  bench::Register("get/copied", {.value = Quantile(copies, 0.5),
                                 .limit = limit,
                                 .target = 0.95 * limit,
                                 .unit = "GB/s",
                                 .limit_name = "memcpy of the same pieces of private memory"});
  bench::Register("get/copied_page_by_page",
                  {.value = Quantile(by_page, 0.5),
                   .limit = limit,
                   .target = 0.95 * limit,
                   .unit = "GB/s",
                   .limit_name = "memcpy of the same pieces of private memory"});
  bench::Register("get/copied_and_checked",
                  {.value = Quantile(checks, 0.5),
                   .limit = limit,
                   .target = 0.5 * limit,
                   .unit = "GB/s",
                   .limit_name = "memcpy of the same pieces of private memory"});
}

// What the first use costs a process that has never mapped these pages: page tables and checksums.
void MeasureFirstUse(const std::string& address,
                     const std::shared_ptr<const Profile>& profile,
                     std::span<const uint32_t> prompt) {
  std::vector<double> first_attach;
  std::vector<double> first_use;
  for (int i = 0; i < 5; ++i) {
    const auto client = NewClient(address, profile);
    absl::Time began = Now();
    const auto prefix = Must(client->Lookup(prompt, {}));
    first_attach.push_back(Microseconds(Now() - began));
    began = Now();
    Must(prefix->WaitForLayer(0));
    first_use.push_back(Microseconds(Now() - began) / 1000);
  }
  bench::Register("attach/first_of_a_process", {.value = Quantile(first_attach, 0.5),
                                                .limit = 0,
                                                .target = 0,
                                                .unit = "us",
                                                .limit_name = "",
                                                .better = bench::Better::kLower});
  bench::Register("attach/first_use_maps_and_verifies", {.value = Quantile(first_use, 0.5),
                                                         .limit = 0,
                                                         .target = 0,
                                                         .unit = "ms",
                                                         .limit_name = "",
                                                         .better = bench::Better::kLower});
}

void Measure() {
  const auto profile = MakeTestProfile(
      {.geometry = {.num_layers = 36, .num_kv_heads = 8, .key_dim = 128, .value_dim = 128},
       .windows = {.sink_tokens = 64, .recent_tokens = 256},
       .rotation_per_layer = true});
  const auto daemon = Must(DaemonProcess::Start({.flags = {"--store.capacity=2GiB"}}));
  const std::vector<uint32_t> prompt = Prompt();
  Publishing publishing(daemon->address(), profile);
  publishing.Run(std::span(prompt).first(size_t{kPages} * kPageTokens));

  MeasureFirstUse(daemon->address(), profile, prompt);
  const auto client = NewClient(daemon->address(), profile);
  MeasureAttach(client.get(), prompt);
  bench::Register("release/round_trip",
                  {.value = Quantile(publishing.MeasureReleases(prompt, kAttaches / 4), 0.5),
                   .limit = 0,
                   .target = 200,
                   .unit = "us",
                   .limit_name = "",
                   .better = bench::Better::kLower});
  MeasureCopies(client.get(), prompt, profile->geometry());
}

}  // namespace
}  // namespace crumb

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) {
    return 1;
  }
  crumb::Measure();
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
