// SPDX-License-Identifier: Apache-2.0
//
// Sequences on a GPU beside the same sequences on the CPU: every step's outputs are compared. Runs
// on a GPU, and on the pretended one of fake_gpu.cc.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "crumb/cuda/transfer.h"
#include "crumb/gpu_batch.h"
#include "crumb/sequence.h"
#include "tests/client/gpu/step_graph.h"

namespace crumb {

// Rotations that are signed permutations, another for every head: rows are the same bits whoever
// rotates them, and so are codes. What differs then is wrong, not rounded.
std::shared_ptr<const Profile> MakeExactProfile(const Geometry& geometry, const Windows& windows);

// A published prefix in device memory: copies of the pages of `sequence`, in the encodings in which
// it holds them, as images of all heads of the model.
class DevicePrefix : public PrefixHandle {
 public:
  DevicePrefix(const Sequence& sequence, uint32_t num_pages);

  // Forgets that a page is there in an encoding.
  void Drop(PageIdx page, PageEncoding encoding) {
    images_[Index(page, encoding)] = nullptr;
    on_host_.reset();
  }
  // Says that the page's BF16 rows are in host memory.
  void MoveToHost(PageIdx page) {
    Drop(page, PageEncoding::kBf16);
    on_host_ = page;
  }

  uint32_t num_pages() const override { return num_pages_; }
  const ProfileId& profile_id() const override { return profile_id_; }
  const std::byte* HeadBlock(PageIdx page,
                             PageEncoding encoding,
                             uint32_t /*layer*/,
                             uint32_t /*kv_head*/) const override {
    static constexpr std::byte kSomewhere{};  // Nobody reads it.
    return encoding == PageEncoding::kBf16 && on_host_ == page ? &kSomewhere : nullptr;
  }
  absl::Status WaitForLayer(uint32_t /*layer*/) override { return absl::OkStatus(); }
  absl::Status Validate() override {
    ++num_validations;
    return valid;
  }
  uint32_t usable_tokens() const override { return num_pages_ * kPageTokens; }
  uint32_t matched_tokens() const override { return usable_tokens(); }
  uint32_t trimmed_tokens() const override { return 0; }
  DataPlane data_plane() const override { return DataPlane::kMap; }
  size_t copied_bytes() const override { return 0; }
  HeadRange heads() const override { return read_heads; }
  int gpu() const override { return on_gpu; }
  const std::byte* GpuPage(PageIdx page, PageEncoding encoding) const override {
    return images_[Index(page, encoding)];
  }
  absl::Status CopyPage(PageIdx, PageEncoding, std::span<std::byte>) override {
    return absl::UnimplementedError("its pages are on the device only");
  }

  HeadRange read_heads;  // What its client says of itself.
  int on_gpu = -1;
  absl::Status valid;  // What Validate answers.
  int num_validations = 0;

 private:
  static size_t Index(PageIdx page, PageEncoding encoding) {
    return size_t{page.value()} * 2 + (encoding == PageEncoding::kBf16 ? 1 : 0);
  }

  const uint32_t num_pages_;
  const ProfileId profile_id_;
  std::unique_ptr<OwnGpuMemory> memory_;
  std::vector<const std::byte*> images_;
  std::optional<PageIdx> on_host_;
};

struct GpuSceneOptions {
  std::shared_ptr<const Profile> profile = nullptr;  // shared: as everywhere.
  HeadRange heads = {};
  int gpu = 0;
  uint32_t int2_pages = 64;
  uint32_t bf16_pages = 64;
  uint32_t max_sequences = 4;
  uint32_t max_tokens = 256;
  bool keeps_outputs_rotated = false;
  ElementType type = ElementType::kBf16;
  ElementType out_type = ElementType::kBf16;
  // Of a row of outputs, relative to the row's length. The smallest error that is one, a token that
  // is read twice or not at all, is one of 1 / sqrt(tokens).
  double tolerance = 0.008;
  // The same for rows of chunks, whose attention rounds probabilities to bf16: with codes 0 to 3,
  // whose mean is not 0, that is 0.2 % of a row for most, and four times as much for a few.
  double chunk_tolerance = 0.02;
};

class GpuScene {
 public:
  static constexpr uint32_t kMaxTokens = 1024;  // Of a sequence.

  struct Live {
    uint32_t seed = 0;  // Of its keys, values and queries.
    std::unique_ptr<GpuSequence> gpu;
    std::unique_ptr<Sequence> cpu;
  };
  struct Member {
    Live* live = nullptr;
    uint32_t num_tokens = 1;
  };

  explicit GpuScene(const GpuSceneOptions& options);
  // Waits for all work.
  ~GpuScene() { Wait(); }
  GpuScene(const GpuScene&) = delete;
  GpuScene& operator=(const GpuScene&) = delete;

  GpuPagePool& pool() { return *pool_; }
  GpuBatch& batch() { return *batch_; }
  GpuStream stream() const { return stream_->get(); }
  void Wait() const;

  std::unique_ptr<Live> NewLive(uint32_t seed) const;
  // A new sequence on the GPU alone.
  std::unique_ptr<GpuSequence> NewSequence(uint32_t max_tokens = kMaxTokens) const;

  // One step of all members, on both sides; expects equal outputs.
  void Step(std::span<const Member> members, bool reads_prefix_once = false);
  void Step(Live* live, uint32_t num_tokens) { Step(std::vector<Member>{{live, num_tokens}}); }
  // The layers of a decode step of `num_rows` rows, to be launched by Replay.
  std::unique_ptr<StepGraph> Capture(uint32_t num_rows, bool reads_prefix_once = false);
  void Replay(std::span<const Member> members, StepGraph* graph);

  // The parts of Step. Rows of one step are on the device at a time, outputs in a host buffer of
  // the caller's.
  struct Outputs {
    std::vector<std::vector<std::byte>> layers;  // [layer] of [token, query head, dim].
  };
  absl::Status Begin(std::span<const Member> members,
                     uint32_t replayed_rows = 0,
                     bool reads_prefix_once = false);
  void EnqueueRows(std::span<const Member> members);
  absl::Status TryLayers() { return TryLayers(stream()); }
  absl::Status TryLayers(GpuStream stream);
  void EnqueueLayers();  // Expects success.
  void EnqueueDownload(Outputs* outputs, uint32_t num_tokens);
  // The CPU's step, and whether outputs are its.
  void ExpectCpus(std::span<const Member> members, const Outputs& outputs);

  // Both sides hold the same pages, byte for byte.
  void ExpectSamePages(const Live& live);
  std::vector<std::byte> Download(const std::byte* device, size_t bytes) const;

  uint32_t query_heads() const { return query_heads_; }

  // Makes this element of all sequences' keys NaN.
  struct Spoilt {
    uint32_t layer = 0;
    uint32_t seed = 0;
    uint32_t position = ~0u;
  };
  Spoilt spoilt;

 private:
  enum class Kind : uint8_t { kQuery, kKey, kValue };

  // With a graph or without.
  void Run(std::span<const Member> members, StepGraph* graph, bool reads_prefix_once);
  GpuBatch::LayerRows RowsOf(uint32_t layer) const;
  uint32_t NumHeads(Kind kind) const;
  size_t TokenBytes() const;
  size_t OutBytes() const;  // Of a token.
  // [count, heads, dim], normal, of 16 bits; the same however they are cut into steps.
  std::vector<float> Rows(
      const Live& live, Kind kind, uint32_t layer, uint32_t first, uint32_t count) const;
  std::vector<std::vector<float>> RunCpu(const Member& member) const;
  static void ExpectRow(std::span<const float> got,
                        std::span<const float> expected,
                        double tolerance);
  std::vector<float> ToModel(uint32_t layer, std::span<const std::byte> outputs) const;

  const GpuSceneOptions options_;
  const Geometry geometry_;  // Of the rank.
  const HeadRange heads_;
  const uint32_t query_heads_;
  std::unique_ptr<OwnGpuStream> stream_;
  std::unique_ptr<GpuPagePool> pool_;
  std::unique_ptr<GpuBatch> batch_;
  std::unique_ptr<OwnGpuMemory> rows_;            // [layer][token][Q heads, K heads, V heads][dim]
  std::unique_ptr<OwnGpuMemory> out_;             // [layer][token][Q heads][dim]
  std::deque<std::vector<std::byte>> host_rows_;  // Of the steps that may still be copied.
};

}  // namespace crumb
