// SPDX-License-Identifier: Apache-2.0
//
// Attention on the GPU over a prefix that lies there, for end-to-end tests.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "gtest/gtest.h"

#include "client/sequence/page_table.h"
#include "crumb/client.h"
#include "crumb/cuda/split_decode.h"
#include "proto/base/bfloat16.h"
#include "tests/cuda/gpu/device_buffer.h"
#include "tests/support/test_profile.h"

namespace crumb {

inline constexpr uint32_t kGpuQueryHeads = 4;

// Of a geometry that the kernels know. Sink 64, recent 128 tokens.
inline std::shared_ptr<const Profile> GpuE2eProfile() {
  return MakeTestProfile(
      {.geometry = {.num_layers = 2, .num_kv_heads = 2, .key_dim = 64, .value_dim = 64},
       .seed = 1});
}

// Pages that are on the GPU as a sequence reads them: the sink in BF16, history in INT2, and the
// recent window in BF16 where the prefix has that.
inline uint32_t PagesOnGpu(const PrefixHandle& prefix, const Profile& profile) {
  const uint32_t sink_pages = profile.windows().sink_tokens / kPageTokens;
  const uint32_t history_end =
      HistoryEnd(prefix.num_pages() * kPageTokens, profile.windows().recent_tokens) / kPageTokens;
  uint32_t count = 0;
  for (uint32_t page = 0; page < prefix.num_pages(); ++page) {
    const bool is_bf16_on_host =
        prefix.HeadBlock(PageIdx(page), PageEncoding::kBf16, 0, 0) != nullptr;
    const PageEncoding encoding = page < sink_pages || (page >= history_end && is_bf16_on_host)
                                      ? PageEncoding::kBf16
                                      : PageEncoding::kInt2;
    count += prefix.GpuPage(PageIdx(page), encoding) != nullptr ? 1u : 0u;
  }
  return count;
}

// One query token of layer 1 over a prefix: the sink in BF16, everything after it in INT2, in
// place.
class GpuAttention {
 public:
  GpuAttention(const PrefixHandle& prefix, const Profile& profile) {
    const Geometry& geometry = profile.geometry();
    const uint32_t num_pages = prefix.num_pages();
    std::vector<const std::byte*> history;
    for (uint32_t page = 1; page < num_pages; ++page) {
      history.push_back(prefix.GpuPage(PageIdx(page), PageEncoding::kInt2));
    }
    history_ = DeviceBuffer<const std::byte*>(history);
    windows_ = DeviceBuffer<const std::byte*>(
        std::vector{prefix.GpuPage(PageIdx(0), PageEncoding::kBf16)});
    history_pages_ = DeviceBuffer<uint32_t>(std::vector<uint32_t>{num_pages - 1});
    window_tokens_ = DeviceBuffer<uint32_t>(std::vector<uint32_t>{kPageTokens});
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    for (uint32_t i = 0; i < kGpuQueryHeads * geometry.key_dim; ++i) {
      host_queries_.push_back(BFloat16::FromFloat(normal(random)).bits);
    }
    queries_ = DeviceBuffer<uint16_t>(host_queries_);
    out_ = DeviceBuffer<float>(host_queries_.size());
    params_ = Shape(geometry);
    params_.queries = queries_.data();
    params_.out = out_.data();
    params_.history.pages = history_.data();
    params_.history.stride = num_pages - 1;
    params_.history_pages = history_pages_.data();
    params_.windows.pages = windows_.data();
    params_.windows.stride = 1;
    params_.window_tokens = window_tokens_.data();
    const auto workspace_bytes = SplitDecodeWorkspaceBytes(params_);
    EXPECT_TRUE(workspace_bytes.ok()) << workspace_bytes.status();
    workspace_ = DeviceBuffer<std::byte>(workspace_bytes.value_or(0));
    workspace_.Fill(0);
    params_.workspace = workspace_.data();
    params_.workspace_bytes = workspace_.size();
  }

  void Launch() {
    const absl::Status status = SplitDecode(params_, nullptr);
    EXPECT_TRUE(status.ok()) << status;
  }
  std::vector<float> Run() {
    Launch();
    CRUMB_EXPECT_CUDA(cudaDeviceSynchronize());
    return out_.Download();
  }
  // The same over images in host memory: [num_pages], the sink's in BF16 first.
  std::vector<float> Expected(const std::vector<std::vector<std::byte>>& images,
                              const Geometry& geometry) const {
    std::vector<const std::byte*> history;
    for (size_t page = 1; page < images.size(); ++page) {
      history.push_back(images[page].data());
    }
    const std::byte* const sink = images[0].data();
    const auto num_history = static_cast<uint32_t>(history.size());
    const uint32_t window_tokens = kPageTokens;
    std::vector<float> out(host_queries_.size());
    SplitDecodeParams params = Shape(geometry);
    params.queries = host_queries_.data();
    params.out = out.data();
    params.history.pages = history.data();
    params.history.stride = num_history;
    params.history_pages = &num_history;
    params.windows.pages = &sink;
    params.windows.stride = 1;
    params.window_tokens = &window_tokens;
    alignas(256) std::byte unused_workspace[256];
    params.workspace = unused_workspace;
    params.workspace_bytes = sizeof(unused_workspace);
    const absl::Status status = SplitDecodeReference(params);
    EXPECT_TRUE(status.ok()) << status;
    return out;
  }

 private:
  static SplitDecodeParams Shape(const Geometry& geometry) {
    SplitDecodeParams params;
    params.num_sequences = 1;
    params.num_query_heads = kGpuQueryHeads;
    params.num_kv_heads = geometry.num_kv_heads;
    params.head_dim = geometry.key_dim;
    params.scale = 0.125f;
    params.out_type = ElementType::kFloat32;
    params.history.block_offset = geometry.HeadBlockOffset(PageEncoding::kInt2, 1, 0);
    params.history.head_stride = geometry.HeadRangeBytes(PageEncoding::kInt2);
    params.windows.block_offset = geometry.HeadBlockOffset(PageEncoding::kBf16, 1, 0);
    params.windows.head_stride = geometry.HeadRangeBytes(PageEncoding::kBf16);
    return params;
  }

  DeviceBuffer<const std::byte*> history_;
  DeviceBuffer<const std::byte*> windows_;
  DeviceBuffer<uint32_t> history_pages_;
  DeviceBuffer<uint32_t> window_tokens_;
  std::vector<uint16_t> host_queries_;
  DeviceBuffer<uint16_t> queries_;
  DeviceBuffer<float> out_;
  SplitDecodeParams params_;
  DeviceBuffer<std::byte> workspace_;
};

}  // namespace crumb
