// SPDX-License-Identifier: Apache-2.0
//
// What it costs an engine to use a prefix of 100,000 tokens of an 8B model (1,562 pages, 2.07 GB at
// two bits) that the daemon, another process, has in the memory of the same GPU: looked up by a new
// engine, and by one that has its chunks mapped; the first decode of all layers over the daemon's
// pages, which nothing copied; and the same prefix brought there from host memory.
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "bench/gpu/service_scene.h"
#include "client/session/control_plane.h"
#include "client/transport/map_transport.h"
#include "crumb/cuda/split_decode.h"
#include "proto/page/page_header.h"
#include "tests/support/daemon_process.h"
#include "tests/support/test_profile.h"

namespace crumb::bench {
namespace {

constexpr uint32_t kPages = 1562;
constexpr uint32_t kStepPages = 150;  // Published at a time.
// Positive, finite scales wherever the daemon looks for some; any codes.
void Fill(uint32_t page, std::span<std::byte> image) {
  for (size_t at = 0; at + 8 <= image.size(); at += 8) {
    const uint64_t word = (at + page) * 0x9e3779b97f4a7c15u & 0x3fff3fff3fff3fffu;
    std::memcpy(image.data() + at, &word, sizeof(word));
  }
}

// Hands over pages that the daemon lacks of the first `num_pages`.
void PublishStep(ControlPlane* control,
                 MapTransport* map,
                 std::span<const uint32_t> tokens,
                 uint32_t num_pages) {
  const MissingPages missing =
      Must(control->BeginPublish("", tokens.first(size_t{num_pages} * kPageTokens), Soon()));
  CommitParams params{.publish = missing.publish, .staged = {}};
  std::vector<std::pair<PageIdx, PageEncoding>> pages;
  if (!missing.bf16.empty() && missing.bf16[0] == PageIdx(0)) {
    pages.emplace_back(PageIdx(0), PageEncoding::kBf16);
  }
  for (const PageIdx page : missing.int2) {
    pages.emplace_back(page, PageEncoding::kInt2);
  }
  size_t bytes = 0;
  for (const auto& [page, encoding] : pages) {
    bytes += kGeometry.PageBytes(encoding);
  }
  const std::span<std::byte> staging = Must(map->AcquireStaging(bytes, Soon()));
  uint64_t offset = 0;
  for (const auto& [page, encoding] : pages) {
    const auto image = staging.subspan(offset, kGeometry.PageBytes(encoding));
    Fill(page.value(), image);
    const auto checksums = HeadChecksums(kGeometry, encoding, HeadRange{0, 8}.Mask(), image);
    params.staged.push_back({.page = page,
                             .encoding = encoding,
                             .offset = offset,
                             .head_crc32c = {checksums.begin(), checksums.begin() + 8}});
    offset += image.size();
  }
  Must(control->CommitPublish(params, Soon()));
  map->ReleaseStaging(false);
}

// Page tables on the device, and one query token of each layer over them.
class Decode {
 public:
  Decode() {
    Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    Check(cudaMalloc(&memory_, kBytes));
    Check(cudaMemset(memory_, 0, kBytes));
    Check(cudaMallocHost(&staging_, kTableBytes));
    params_.num_sequences = 1;
    params_.num_query_heads = 32;
    params_.num_kv_heads = 8;
    params_.head_dim = 128;
    params_.scale = 0.088f;
    params_.queries = memory_ + kTableBytes;
    params_.out = memory_ + kTableBytes + 8192;
    params_.history.pages = reinterpret_cast<const std::byte* const*>(memory_);
    params_.history.stride = kPages - 1;
    params_.history.head_stride = kGeometry.HeadRangeBytes(PageEncoding::kInt2);
    params_.windows.pages = params_.history.pages + kPages - 1;
    params_.windows.stride = 1;
    params_.windows.head_stride = kGeometry.HeadRangeBytes(PageEncoding::kBf16);
    params_.history_pages = reinterpret_cast<const uint32_t*>(memory_ + kPages * sizeof(void*));
    params_.window_tokens = params_.history_pages + 1;
    params_.workspace = memory_ + kTableBytes + 16384;
    params_.workspace_bytes = Must(SplitDecodeWorkspaceBytes(params_));
    CRUMB_CHECK(params_.workspace_bytes <= kBytes - kTableBytes - 16384, "workspace");
  }
  ~Decode() {
    cudaFreeHost(staging_);
    cudaFree(memory_);
    cudaStreamDestroy(stream_);
  }
  Decode(const Decode&) = delete;
  Decode& operator=(const Decode&) = delete;

  bool Upload(const PrefixHandle& prefix) {
    auto* const table = reinterpret_cast<const std::byte**>(staging_);
    for (uint32_t page = 1; page < kPages; ++page) {
      table[page - 1] = prefix.GpuPage(PageIdx(page), PageEncoding::kInt2);
    }
    table[kPages - 1] = prefix.GpuPage(PageIdx(0), PageEncoding::kBf16);
    const uint32_t counts[2] = {kPages - 1, kPageTokens};
    std::memcpy(staging_ + kPages * sizeof(void*), counts, sizeof(counts));
    Check(cudaMemcpyAsync(memory_, staging_, kPages * sizeof(void*) + sizeof(counts),
                          cudaMemcpyHostToDevice, stream_));
    return true;
  }
  bool AllLayers() {
    for (uint32_t layer = 0; layer < kGeometry.num_layers; ++layer) {
      params_.history.block_offset = kGeometry.HeadBlockOffset(PageEncoding::kInt2, layer, 0);
      params_.windows.block_offset = kGeometry.HeadBlockOffset(PageEncoding::kBf16, layer, 0);
      Must(SplitDecode(params_, stream_));
    }
    Check(cudaStreamSynchronize(stream_));
    Must(TakeSplitDecodeProblem(params_, stream_));
    return true;
  }

 private:
  static constexpr size_t kTableBytes = size_t{16} << 10;
  static constexpr size_t kBytes = size_t{64} << 20;

  cudaStream_t stream_ = nullptr;
  std::byte* memory_ = nullptr;
  std::byte* staging_ = nullptr;
  SplitDecodeParams params_;
};

// The prefix from host memory: a new engine's first upload as soon as it is attached, when its
// chunks are still being registered; that of one which has been attached for a while; and later
// ones.
void MeasureUploads(const std::string& address,
                    const std::shared_ptr<const Profile>& profile,
                    std::span<const uint32_t> prompt) {
  cudaStream_t stream = nullptr;
  Check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const auto arrival = [&](const GpuUpload& upload, uint32_t layer, absl::Time began) {
    Must(upload.DelayUntilLayer(layer, stream));
    Check(cudaStreamSynchronize(stream));
    return MsSince(began);
  };
  constexpr absl::Duration kForAWhile = absl::Seconds(2);
  for (const uint32_t layers : {1u, 4u, 9u, 36u}) {
    Times at_once;
    Times first;
    Times layer_0;
    Times all;
    size_t bytes = 0;
    for (const bool waits : {false, true}) {
      const auto client = NewClient(address, profile);
      absl::SleepFor(waits ? kForAWhile : absl::ZeroDuration());
      for (int round = 0; round < 3; ++round) {
        const auto prefix = Must(client->Lookup(prompt, {.timeout = absl::Seconds(10)}));
        const absl::Time began = Now();
        const auto upload = Must(prefix->UploadToGpu({.layers_per_group = layers}));
        Must(upload->registration());
        const double of_layer_0 = arrival(*upload, 0, began);
        const double of_all = arrival(*upload, kGeometry.num_layers - 1, began);
        bytes = upload->copied_bytes();
        if (round == 0) {
          (waits ? first : at_once).ms.push_back(of_all);
        } else {
          layer_0.ms.push_back(of_layer_0);
          all.ms.push_back(of_all);
        }
      }
    }
    const std::string shape = absl::StrCat("groups of ", layers, " layers");
    Print("upload", shape, std::move(all), bytes);
    Print("upload", shape + ", an engine's first, just attached", std::move(at_once), bytes);
    Print("upload", shape + ", an engine's first", std::move(first), bytes);
    Print("upload_layer_0", shape, std::move(layer_0), 0);
  }
  Check(cudaStreamDestroy(stream));
}

// The first check of the bytes of a prefix in host memory: on the host, and on the GPU that it was
// copied to.
void MeasureChecks(const std::string& address,
                   const std::shared_ptr<const Profile>& profile,
                   std::span<const uint32_t> prompt) {
  Times on_host;
  Times on_gpu;
  size_t bytes = 0;
  for (int round = 0; round < 3; ++round) {
    const auto by_host = NewClient(address, profile, /*verifies=*/true);
    const auto read_there = Must(by_host->Lookup(prompt, {.timeout = absl::Seconds(10)}));
    const absl::Time began = Now();
    Must(read_there->Validate());
    on_host.ms.push_back(MsSince(began));

    const auto by_gpu = NewClient(address, profile, /*verifies=*/true);
    const auto prefix = Must(by_gpu->Lookup(prompt, {.timeout = absl::Seconds(10)}));
    const auto upload = Must(prefix->UploadToGpu({}));
    Check(cudaDeviceSynchronize());
    const absl::Time copied = Now();
    Must(upload->Validate());
    on_gpu.ms.push_back(MsSince(copied));
    bytes = upload->copied_bytes();
  }
  Print("validate", "on the host, one core", std::move(on_host), bytes);
  Print("validate", "on the GPU, after an upload", std::move(on_gpu), bytes);
}

// Two-bit pages as an engine made them, step by step.
void PublishAll(const std::string& address,
                const std::shared_ptr<const Profile>& profile,
                std::span<const uint32_t> prompt) {
  const auto control = ControlPlane::Create(address);
  const AttachedSession session = Must(control->Attach({.client_name = "publisher",
                                                        .tenant = "default",
                                                        .profile = profile,
                                                        .heads = {0, kGeometry.num_kv_heads}}));
  const auto map = Must(MapTransport::Connect({}, session.info, Soon()));
  const auto client = NewClient(address, profile);
  for (uint32_t pages = kStepPages; pages < kPages; pages += kStepPages) {
    PublishStep(control.get(), map.get(), prompt, pages);
  }
  PublishStep(control.get(), map.get(), prompt, kPages);
  const absl::Time published = Now();
  while (!IsOnGpu(*Lookup(client.get(), prompt), kPages)) {
    CRUMB_CHECK(Now() - published < absl::Seconds(30), "the daemon copies pages to the GPU");
  }
  Print("until_on_gpu", "two-bit pages from host memory", {{MsSince(published)}}, 0);
}

void Run(const std::string& gpu_chunk) {
  Check(cudaFree(nullptr));  // The first use of the GPU in a process takes 0.15 s.
  const auto profile = MakeTestProfile({.geometry = kGeometry, .rotation_per_layer = true});
  const auto daemon = Must(
      DaemonProcess::Start({.flags = {"--store.capacity=8GiB", "--store.gpu_arena=4GiB",
                                      "--store.gpu_chunk=" + gpu_chunk, "--demote.threads=8"}}));
  const std::vector<uint32_t> prompt = Prompt(kPages);
  PublishAll(daemon->address(), profile, prompt);

  Decode decode;
  Times attach;
  Times cold;
  Times warm;
  Times on_host;
  Times upload;
  Times first_decode;
  const auto timed = [](Times* times, const auto& work) {
    const absl::Time began = Now();
    auto result = work();
    times->ms.push_back(MsSince(began));
    return result;
  };
  for (int round = 0; round < 7; ++round) {
    const auto other = timed(&attach, [&] { return NewClient(daemon->address(), profile); });
    CRUMB_CHECK(other->state().reads_gpu_pages, "the daemon offers pages on this GPU");
    auto found = timed(&cold, [&] { return Lookup(other.get(), prompt); });
    CRUMB_CHECK(IsOnGpu(*found, kPages) && found->copied_bytes() == 0, "all in place");
    for (int again = 0; again < 3; ++again) {
      found = nullptr;
      found = timed(&warm, [&] { return Lookup(other.get(), prompt); });
    }
    timed(&upload, [&] { return decode.Upload(*found); });
    timed(&first_decode, [&] { return decode.AllLayers(); });
    Must(found->Validate());
    timed(&on_host, [&] { return Must(other->Lookup(prompt, {.timeout = absl::Seconds(10)})); });
  }
  MeasureUploads(daemon->address(), profile, prompt);
  MeasureChecks(daemon->address(), profile, prompt);
  const std::string chunks = "chunks of " + gpu_chunk;
  Print("attach", "a new engine's session", std::move(attach), 0);
  Print("lookup_on_gpu", chunks + ", a new engine's first", std::move(cold), 0);
  Print("lookup_on_gpu", chunks + ", mapped", std::move(warm), 0);
  Print("lookup_on_host", "a new engine's first", std::move(on_host), 0);
  Print("page_table", "1,562 addresses to the device, enqueued", std::move(upload), 0);
  Print("decode_36_layers", "one token over the daemon's pages", std::move(first_decode), 0);
}

}  // namespace
}  // namespace crumb::bench

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    crumb::bench::Run(argv[i]);
  }
  if (argc == 1) {
    crumb::bench::Run("128MiB");
  }
}
