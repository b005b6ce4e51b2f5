// SPDX-License-Identifier: Apache-2.0
//
// A scene in device memory, and split decode run over it.
#pragma once

#include <utility>
#include <vector>

#include "crumb/cuda/device.h"
#include "crumb/cuda/split_decode.h"
#include "cuda/gpu/decode_grid.h"
#include "cuda/launch/decode_workspace.h"
#include "tests/cuda/gpu/decode_scene.h"
#include "tests/cuda/gpu/device_buffer.h"
#include "tests/cuda/gpu/gpu_fixture.h"

namespace crumb {

class DeviceScene {
 public:
  explicit DeviceScene(const DecodeScene& scene)
      : int2_(scene.int2_arena()),
        bf16_(scene.bf16_arena()),
        history_(scene.HistoryTable(int2_.data())),
        windows_(scene.WindowTable(bf16_.data())),
        history_pages_(scene.HistoryPages()),
        window_tokens_(scene.WindowTokens()),
        queries_(scene.queries()),
        out_(scene.num_rows() * scene.shape().head_dim),
        lse_(scene.num_rows()),
        params_(scene.Params()) {
    params_.queries = queries_.data();
    params_.out = out_.data();
    params_.lse = lse_.data();
    params_.history.pages = history_.data();
    params_.history_pages = history_pages_.data();
    params_.windows.pages = windows_.data();
    params_.window_tokens = window_tokens_.data();
    workspace_ = DeviceBuffer<std::byte>(
        gpu::DecodeWorkspaceBytes(params_, gpu::DecodeWorkspace::kMaxBlocks));
    workspace_.Fill(0);
    params_.workspace = workspace_.data();
    params_.workspace_bytes = workspace_.size();
  }

  SplitDecodeParams& params() { return params_; }
  DeviceBuffer<const std::byte*>& history() { return history_; }
  DeviceBuffer<uint32_t>& history_pages() { return history_pages_; }
  DeviceBuffer<uint32_t>& window_tokens() { return window_tokens_; }

  // Outputs become NaN, so that what a launch leaves out shows.
  void SpoilOutputs() {
    out_.Fill(0xff);
    lse_.Fill(0xff);
  }
  DecodeScene::Result Download() const { return {out_.Download(), lse_.Download()}; }

  DecodeScene::Result Run() {
    SpoilOutputs();
    const absl::Status status = SplitDecode(params_, nullptr);
    EXPECT_TRUE(status.ok()) << status;
    CRUMB_EXPECT_CUDA(cudaDeviceSynchronize());
    return Download();
  }
  DecodeScene::Result RunOnGrid(const gpu::DecodeGrid& grid) {
    SpoilOutputs();
    const absl::Status status = gpu::SplitDecodeOnGrid(params_, grid, nullptr);
    EXPECT_TRUE(status.ok()) << status;
    CRUMB_EXPECT_CUDA(cudaDeviceSynchronize());
    return Download();
  }

 private:
  DeviceBuffer<std::byte> int2_;
  DeviceBuffer<std::byte> bf16_;
  DeviceBuffer<const std::byte*> history_;
  DeviceBuffer<const std::byte*> windows_;
  DeviceBuffer<uint32_t> history_pages_;
  DeviceBuffer<uint32_t> window_tokens_;
  DeviceBuffer<uint16_t> queries_;
  DeviceBuffer<float> out_;
  DeviceBuffer<float> lse_;
  SplitDecodeParams params_;
  DeviceBuffer<std::byte> workspace_;
};

}  // namespace crumb
