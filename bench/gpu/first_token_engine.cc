// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu/first_token_engine.h"

#include <random>
#include <utility>
#include <vector>

#include "proto/base/bfloat16.h"

namespace crumb::bench {
namespace {

constexpr uint32_t kQueryHeads = 32;
constexpr uint32_t kHeads = kQueryHeads + 2 * kGeometry.num_kv_heads;
constexpr size_t kHeadBytes = kGeometry.key_dim * sizeof(BFloat16);
constexpr uint32_t kMaxLength = 1u << 17;

}  // namespace

FirstTokenEngine::FirstTokenEngine(
    std::shared_ptr<const Profile> profile,  // shared: as everywhere.
    PagesFrom from)
    : from_(from) {
  const Windows windows = profile->windows();
  pool_ = Must(GpuPagePool::Create({.profile = std::move(profile),
                                    .int2_pages = 8,
                                    .bf16_pages = GpuPagePool::Bf16PagesFor(windows, 1, 1)}));
  batch_ = Must(GpuBatch::Create({.pool = pool_.get(),
                                  .num_query_heads = kQueryHeads,
                                  .max_sequences = 1,
                                  .max_length = kMaxLength,
                                  .captures_long_history = true}));
  Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<BFloat16> row(kHeads * kGeometry.key_dim);
  for (BFloat16& value : row) {
    value = BFloat16::FromFloat(normal(random));
  }
  Check(cudaMalloc(&rows_, (kHeads + kQueryHeads) * kHeadBytes));
  Check(cudaMemcpy(rows_, row.data(), kHeads * kHeadBytes, cudaMemcpyHostToDevice));
  Capture();
  WarmUp();
}

FirstTokenEngine::~FirstTokenEngine() {
  cudaStreamSynchronize(stream_);
  cudaGraphExecDestroy(graph_);
  cudaStreamDestroy(stream_);
  cudaFree(rows_);
}

GpuBatch::LayerRows FirstTokenEngine::rows() const {
  const auto head = [this](uint32_t index) {
    return TokenRows{.data = rows_ + index * kHeadBytes, .token_stride = kHeads * kHeadBytes};
  };
  return {.queries = head(0),
          .keys = head(kQueryHeads),
          .values = head(kQueryHeads + kGeometry.num_kv_heads),
          .out = rows_ + kHeads * kHeadBytes};
}

void FirstTokenEngine::Capture() {
  cudaGraph_t graph = nullptr;
  Check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal));
  for (uint32_t layer = 0; layer < kGeometry.num_layers; ++layer) {
    Must(batch_->DecodeLayer(layer, 1, rows(), stream_));
  }
  Check(cudaStreamEndCapture(stream_, &graph));
  Check(cudaGraphInstantiate(&graph_, graph, 0));
  Check(cudaGraphDestroy(graph));
}

// Every kernel once, as an engine does before it serves.
void FirstTokenEngine::WarmUp() {
  const auto sequence = Must(GpuSequence::Create({.pool = pool_.get()}));
  for (int token = 0; token < 3; ++token) {
    Step(sequence.get());
  }
}

void FirstTokenEngine::Step(GpuSequence* sequence) {
  const GpuBatch::Member member{sequence, 1};
  // Layers of a graph begin when all of a prefix is there, layers enqueued one by one when they
  // are.
  const bool is_replayed = from_ == PagesFrom::kGpu;
  Must(batch_->BeginStep({.members = {&member, 1}, .replayed_rows = is_replayed ? 1u : 0u},
                         stream_));
  if (is_replayed) {
    Check(cudaGraphLaunch(graph_, stream_));
  } else {
    for (uint32_t layer = 0; layer < kGeometry.num_layers; ++layer) {
      Must(batch_->Layer(layer, rows(), stream_));
    }
  }
  Must(batch_->EndStep(stream_));
  Check(cudaStreamSynchronize(stream_));
  Must(batch_->Validate());
}

FirstTokenEngine::Times FirstTokenEngine::Run(Client* client, std::span<const uint32_t> prompt) {
  Times times;
  const absl::Time began = Now();
  const auto prefix = Must(
      client->Lookup(prompt, {.on_gpu = from_ == PagesFrom::kGpu, .timeout = absl::Seconds(10)}));
  times.lookup_ms = MsSince(began);
  CRUMB_CHECK(prefix->usable_tokens() + 1 == prompt.size(), "all but the last token are found");
  std::shared_ptr<GpuUpload> upload;  // shared: as Adopt takes it.
  if (from_ != PagesFrom::kGpu) {
    upload = Must(prefix->UploadToGpu({}));
    times.copied_bytes = upload->copied_bytes();
  }
  const auto sequence = Must(GpuSequence::Create({.pool = pool_.get()}));
  Must(sequence->Adopt(prefix, upload));
  Step(sequence.get());
  times.ms = MsSince(began);
  return times;
}

}  // namespace crumb::bench
