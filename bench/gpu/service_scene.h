// SPDX-License-Identifier: Apache-2.0
//
// A prefix of an 8B model between a crumbd and engines of this process, on one GPU: what the
// benchmarks of the service have in common. Errors end the program.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "bench/support/must.h"
#include "crumb/client.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/page/geometry.h"

namespace crumb::bench {

// 36 layers, 8 KV heads, head_dim 128: 9.4 MB a page in BF16, 1.33 MB at two bits.
inline constexpr Geometry kGeometry{
    .num_layers = 36, .num_kv_heads = 8, .key_dim = 128, .value_dim = 128};

inline absl::Time Now() {
  return Clock::System().Now();
}
inline absl::Time Soon() {
  return Now() + absl::Seconds(60);
}
inline double MsSince(absl::Time began) {
  return absl::ToDoubleMilliseconds(Now() - began);
}

inline void Check(cudaError_t error) {
  CRUMB_CHECK(error == cudaSuccess, cudaGetErrorString(error));
}

// Of whole pages, and some tokens more, so that all of them may be used at two bits.
inline std::vector<uint32_t> Prompt(uint32_t num_pages, uint32_t seed = 0) {
  std::vector<uint32_t> tokens(size_t{num_pages} * kPageTokens + 300);
  for (size_t i = 0; i < tokens.size(); ++i) {
    tokens[i] = seed * 60'013 + static_cast<uint32_t>(i) * 7919u % 50'021u;
  }
  return tokens;
}

inline std::unique_ptr<Client> NewClient(const std::string& address,
                                         const std::shared_ptr<const Profile>& profile,
                                         bool verifies = false) {
  auto client = Must(Client::Create({.address = address,
                                     .profile = profile,
                                     .data_plane = DataPlane::kMap,
                                     .verify_mapped_pages = verifies,
                                     .gpu = 0}));
  Must(client->WaitAttached(absl::Seconds(30)));
  return client;
}

// Every page after the sink's in INT2, and the sink in BF16.
inline bool IsOnGpu(const PrefixHandle& prefix, uint32_t num_pages) {
  if (prefix.num_pages() != num_pages ||
      prefix.GpuPage(PageIdx(0), PageEncoding::kBf16) == nullptr) {
    return false;
  }
  for (uint32_t page = 1; page < num_pages; ++page) {
    if (prefix.GpuPage(PageIdx(page), PageEncoding::kInt2) == nullptr) {
      return false;
    }
  }
  return true;
}

inline std::shared_ptr<PrefixHandle> Lookup(Client* client, std::span<const uint32_t> prompt) {
  return Must(client->Lookup(prompt, {.on_gpu = true, .timeout = absl::Seconds(10)}));
}

// Milliseconds, of which the median counts.
struct Times {
  std::vector<double> ms;
  double Median() {
    CRUMB_CHECK(!ms.empty(), "something was timed");
    std::sort(ms.begin(), ms.end());
    return ms[ms.size() / 2];
  }
};

// A line of JSON for report.py. `bytes` 0: none are moved. `tokens` 0: not said.
inline void Print(
    const char* op, const std::string& shape, Times times, size_t bytes, uint32_t tokens = 0) {
  const double median = times.Median();
  std::printf(
      "{\"op\": \"%s\", \"service\": true, \"shape\": \"%s\", \"ms\": %.3f, \"min_ms\": %.3f, "
      "\"max_ms\": %.3f, \"n\": %zu, \"bytes\": %zu, \"tokens\": %u}\n",
      op, shape.c_str(), median, times.ms.front(), times.ms.back(), times.ms.size(), bytes, tokens);
  std::fflush(stdout);
}

}  // namespace crumb::bench
