// SPDX-License-Identifier: Apache-2.0
//
// What it costs an engine to use a prefix of 100,000 tokens of an 8B model (36 layers, 8 KV heads,
// head_dim 128: 1,562 pages, 2.07 GB at two bits) that the daemon has in the memory of the same
// GPU. The daemon is another process. A line of JSON each: the copy to the GPU, once; an attach by
// a new engine, that maps all chunks; one by an engine that has them mapped; and the first decode
// of all layers over the daemon's pages, which nothing copied.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "bench/support/must.h"
#include "client/session/control_plane.h"
#include "client/transport/map_transport.h"
#include "crumb/client.h"
#include "crumb/cuda/split_decode.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/page/page_header.h"
#include "tests/support/daemon_process.h"
#include "tests/support/test_profile.h"

namespace crumb::bench {
namespace {

constexpr uint32_t kPages = 1562;
constexpr uint32_t kStepPages = 150;  // Published at a time.
constexpr Geometry kGeometry{.num_layers = 36, .num_kv_heads = 8, .key_dim = 128, .value_dim = 128};

absl::Time Now() {
  return Clock::System().Now();
}
absl::Time Soon() {
  return Now() + absl::Seconds(60);
}
double Microseconds(absl::Duration duration) {
  return absl::ToDoubleMicroseconds(duration);
}

struct Times {
  std::vector<double> microseconds;
  double Median() {
    std::sort(microseconds.begin(), microseconds.end());
    return microseconds[microseconds.size() / 2];
  }
  void Print(const char* name, const char* what) {
    const double median = Median();
    std::printf(
        "{\"bench\": \"gpu_attach\", \"case\": \"%s\", \"median_us\": %.0f, "
        "\"min_us\": %.0f, \"max_us\": %.0f, \"n\": %zu, \"what\": \"%s\"}\n",
        name, median, microseconds.front(), microseconds.back(), microseconds.size(), what);
    std::fflush(stdout);
  }
};

std::vector<uint32_t> Prompt() {
  std::vector<uint32_t> tokens(size_t{kPages} * kPageTokens + 300);
  for (size_t i = 0; i < tokens.size(); ++i) {
    tokens[i] = static_cast<uint32_t>(i) * 7919u % 50'021u;
  }
  return tokens;
}

void Check(cudaError_t error) {
  CRUMB_CHECK(error == cudaSuccess, cudaGetErrorString(error));
}

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

std::unique_ptr<Client> NewClient(const std::string& address,
                                  const std::shared_ptr<const Profile>& profile) {
  auto client = Must(Client::Create({.address = address,
                                     .profile = profile,
                                     .data_plane = DataPlane::kMap,
                                     .verify_mapped_pages = false,
                                     .gpu = 0}));
  Must(client->WaitAttached(absl::Seconds(30)));
  CRUMB_CHECK(client->state().reads_gpu_pages, "the daemon offers pages on this GPU");
  return client;
}

bool IsOnGpu(const PrefixHandle& prefix) {
  if (prefix.num_pages() != kPages || prefix.GpuPage(PageIdx(0), PageEncoding::kBf16) == nullptr) {
    return false;
  }
  for (uint32_t page = 1; page < kPages; ++page) {
    if (prefix.GpuPage(PageIdx(page), PageEncoding::kInt2) == nullptr) {
      return false;
    }
  }
  return true;
}

std::shared_ptr<PrefixHandle> Lookup(Client* client, std::span<const uint32_t> prompt) {
  return Must(client->Lookup(prompt, {.on_gpu = true, .timeout = absl::Seconds(10)}));
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

  void Upload(const PrefixHandle& prefix) {
    auto* const table = reinterpret_cast<const std::byte**>(staging_);
    for (uint32_t page = 1; page < kPages; ++page) {
      table[page - 1] = prefix.GpuPage(PageIdx(page), PageEncoding::kInt2);
    }
    table[kPages - 1] = prefix.GpuPage(PageIdx(0), PageEncoding::kBf16);
    const uint32_t counts[2] = {kPages - 1, kPageTokens};
    std::memcpy(staging_ + kPages * sizeof(void*), counts, sizeof(counts));
    Check(cudaMemcpyAsync(memory_, staging_, kPages * sizeof(void*) + sizeof(counts),
                          cudaMemcpyHostToDevice, stream_));
  }
  void AllLayers() {
    for (uint32_t layer = 0; layer < kGeometry.num_layers; ++layer) {
      params_.history.block_offset = kGeometry.HeadBlockOffset(PageEncoding::kInt2, layer, 0);
      params_.windows.block_offset = kGeometry.HeadBlockOffset(PageEncoding::kBf16, layer, 0);
      Must(SplitDecode(params_, stream_));
    }
    Check(cudaStreamSynchronize(stream_));
    Must(TakeSplitDecodeProblem(params_, stream_));
  }

 private:
  static constexpr size_t kTableBytes = size_t{16} << 10;
  static constexpr size_t kBytes = size_t{64} << 20;

  cudaStream_t stream_ = nullptr;
  std::byte* memory_ = nullptr;
  std::byte* staging_ = nullptr;
  SplitDecodeParams params_;
};

// The prefix from host memory: a new engine's first upload registers the mapped chunks, later ones
// find them registered.
void MeasureUploads(const std::string& address,
                    const std::shared_ptr<const Profile>& profile,
                    std::span<const uint32_t> prompt) {
  for (const uint32_t layers : {1u, 4u, 9u, 36u}) {
    const auto client = NewClient(address, profile);
    for (int round = 0; round < 4; ++round) {
      const auto prefix = Must(client->Lookup(prompt, {.timeout = absl::Seconds(10)}));
      const absl::Time began = Now();
      const auto upload = Must(prefix->UploadToGpu({.layers_per_group = layers}));
      const absl::Time enqueued = Now();
      cudaStream_t stream = nullptr;
      Check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
      Must(upload->DelayUntilLayer(0, stream));
      Check(cudaStreamSynchronize(stream));
      const absl::Time first = Now();
      Must(upload->DelayUntilLayer(kGeometry.num_layers - 1, stream));
      Check(cudaStreamSynchronize(stream));
      const absl::Time all = Now();
      Check(cudaStreamDestroy(stream));
      std::printf(
          "{\"bench\": \"gpu_upload\", \"layers_per_group\": %u, \"round\": %d, "
          "\"registered\": %d, \"enqueued_ms\": %.1f, \"layer_0_ms\": %.1f, "
          "\"all_ms\": %.1f, \"gb\": %.3f, \"gb_per_s_after_enqueue_began\": %.1f}\n",
          layers, round, upload->registration().ok() ? 1 : 0,
          absl::ToDoubleMilliseconds(enqueued - began), absl::ToDoubleMilliseconds(first - began),
          absl::ToDoubleMilliseconds(all - began),
          static_cast<double>(upload->copied_bytes()) / 1e9,
          static_cast<double>(upload->copied_bytes()) / 1e9 / absl::ToDoubleSeconds(all - began));
      std::fflush(stdout);
    }
  }
}

void Run(const std::string& gpu_chunk) {
  const auto profile = MakeTestProfile({.geometry = kGeometry, .rotation_per_layer = true});
  const auto daemon = Must(
      DaemonProcess::Start({.flags = {"--store.capacity=8GiB", "--store.gpu_arena=4GiB",
                                      "--store.gpu_chunk=" + gpu_chunk, "--demote.threads=8"}}));
  const std::vector<uint32_t> prompt = Prompt();
  const auto control = ControlPlane::Create(daemon->address());
  const AttachedSession session = Must(control->Attach({.client_name = "publisher",
                                                        .tenant = "default",
                                                        .profile = profile,
                                                        .heads = {0, kGeometry.num_kv_heads}}));
  const auto map = Must(MapTransport::Connect({}, session.info, Soon()));
  for (uint32_t pages = kStepPages; pages < kPages; pages += kStepPages) {
    PublishStep(control.get(), map.get(), prompt, pages);
  }
  PublishStep(control.get(), map.get(), prompt, kPages);
  const absl::Time published = Now();

  auto client = NewClient(daemon->address(), profile);
  auto prefix = Lookup(client.get(), prompt);
  while (!IsOnGpu(*prefix)) {
    CRUMB_CHECK(Now() - published < absl::Seconds(30), "the daemon copies pages to the GPU");
    prefix = Lookup(client.get(), prompt);
  }
  Decode decode;
  std::printf("chunks of %s; all on the GPU %.0f ms after the last commit\n", gpu_chunk.c_str(),
              absl::ToDoubleMilliseconds(Now() - published));

  Times cold;
  Times warm;
  Times on_host;
  Times upload;
  Times first_decode;
  for (int round = 0; round < 7; ++round) {
    const auto other = NewClient(daemon->address(), profile);
    const absl::Time began = Now();
    auto found = Lookup(other.get(), prompt);
    cold.microseconds.push_back(Microseconds(Now() - began));
    CRUMB_CHECK(IsOnGpu(*found) && found->copied_bytes() == 0, "all in place");
    for (int again = 0; again < 3; ++again) {
      found = nullptr;
      const absl::Time began_again = Now();
      found = Lookup(other.get(), prompt);
      warm.microseconds.push_back(Microseconds(Now() - began_again));
    }
    const absl::Time uploaded = Now();
    decode.Upload(*found);
    upload.microseconds.push_back(Microseconds(Now() - uploaded));
    const absl::Time decoded = Now();
    decode.AllLayers();
    first_decode.microseconds.push_back(Microseconds(Now() - decoded));
    Must(found->Validate());
    const absl::Time looked_up = Now();
    Must(other->Lookup(prompt, {.timeout = absl::Seconds(10)}));
    on_host.microseconds.push_back(Microseconds(Now() - looked_up));
  }
  MeasureUploads(daemon->address(), profile, prompt);
  cold.Print("new_engine", "lookup and map, first in the process; 0 bytes copied");
  warm.Print("mapped_engine", "lookup, chunks mapped before; 0 bytes copied");
  on_host.Print("host_map_first", "the same prefix in host memory: lookup and map, nothing read");
  upload.Print("page_table", "1,562 addresses to the device, enqueued");
  first_decode.Print("decode_36_layers", "attention of one token over the daemon's pages");
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
