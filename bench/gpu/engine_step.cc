// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu/engine_step.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "bench/gpu/gpu_timer.h"
#include "bench/support/must.h"

namespace crumb::bench {
namespace {

constexpr uint32_t kChunkTokens = 288;  // The recent window and half a page.
constexpr int kSteps = 150;
constexpr int kWarmSteps = kPageTokens;  // Until every kernel has been launched once.

// The sink and history of a sequence of a DecodeBatch.
class BatchPrefix : public PrefixHandle {
 public:
  BatchPrefix(const std::byte* sink,
              std::vector<const std::byte*> history,
              std::shared_ptr<const Profile> profile)  // shared: as everywhere.
      : sink_(sink), history_(std::move(history)), profile_(std::move(profile)) {}

  uint32_t num_pages() const override { return static_cast<uint32_t>(history_.size()) + 1; }
  const ProfileId& profile_id() const override { return profile_->id(); }
  const std::byte* HeadBlock(PageIdx, PageEncoding, uint32_t, uint32_t) const override {
    return nullptr;
  }
  absl::Status WaitForLayer(uint32_t /*layer*/) override { return absl::OkStatus(); }
  absl::Status Validate() override { return absl::OkStatus(); }
  uint32_t usable_tokens() const override { return num_pages() * kPageTokens; }
  uint32_t matched_tokens() const override { return usable_tokens(); }
  uint32_t trimmed_tokens() const override { return 0; }
  DataPlane data_plane() const override { return DataPlane::kMap; }
  size_t copied_bytes() const override { return 0; }
  const std::byte* GpuPage(PageIdx page, PageEncoding encoding) const override {
    if (page.value() == 0) {
      return encoding == PageEncoding::kBf16 ? sink_ : nullptr;
    }
    return encoding == PageEncoding::kInt2 ? history_[page.value() - 1] : nullptr;
  }
  absl::Status CopyPage(PageIdx, PageEncoding, std::span<std::byte>) override {
    return absl::UnimplementedError("its pages are on the device only");
  }

 private:
  const std::byte* const sink_;
  const std::vector<const std::byte*> history_;
  const std::shared_ptr<const Profile> profile_;  // shared: as everywhere.
};

std::vector<const std::byte*> Table(const DevicePageTable& table, uint32_t num_sequences) {
  std::vector<const std::byte*> pages(size_t{num_sequences} * table.stride);
  CheckCuda(cudaMemcpy(pages.data(), table.pages, pages.size() * sizeof(pages[0]),
                       cudaMemcpyDeviceToHost),
            "reading a page table");
  return pages;
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

double Microseconds(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration<double, std::micro>(duration).count();
}

}  // namespace

EngineStep::EngineStep(const DecodeBatch& batch,
                       const CodecPages& rows,
                       std::shared_ptr<const Profile> profile,  // shared: as everywhere.
                       const Form& form)
    : rows_(rows),
      form_(form),
      geometry_(batch.shape().geometry),
      num_sequences_(batch.shape().num_sequences) {
  const Windows& windows = profile->windows();
  const uint64_t history_tokens = uint64_t{num_sequences_} * batch.shape().history_tokens;
  pool_ = Must(GpuPagePool::Create(
      {.profile = std::move(profile),
       .int2_pages = num_sequences_ * 4,
       .bf16_pages = GpuPagePool::Bf16PagesFor(windows, num_sequences_, kChunkTokens),
       .keeps_outputs_rotated = form.keeps_outputs_rotated}));
  batch_ = Must(
      GpuBatch::Create({.pool = pool_.get(),
                        .num_query_heads = batch.shape().num_query_heads,
                        .max_sequences = num_sequences_,
                        .max_tokens = std::max(num_sequences_, kChunkTokens),
                        .max_length = batch.shape().history_tokens + 2048,
                        .captures_long_history = history_tokens >= GpuBatch::kLongHistoryTokens}));
  CheckCuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream");
  const size_t out_bytes = size_t{2} * std::max(num_sequences_, kChunkTokens) *
                           batch.shape().num_query_heads * geometry_.key_dim;
  CheckCuda(cudaMalloc(&out_, out_bytes), "allocating outputs");
  Adopt(batch);
  Prefill();
  Capture();
}

EngineStep::~EngineStep() {
  cudaStreamSynchronize(stream_);
  cudaGraphExecDestroy(graph_);
  cudaStreamDestroy(stream_);
  cudaFree(out_);
}

void EngineStep::Adopt(const DecodeBatch& batch) {
  const SplitDecodeParams params = batch.Params(0);
  const auto history = Table(params.history, num_sequences_);
  const auto windows = Table(params.windows, num_sequences_);
  const std::shared_ptr<const Profile> profile(&pool_->profile(), [](const Profile*) {});
  std::shared_ptr<BatchPrefix> prefix;
  for (uint32_t i = 0; i < num_sequences_; ++i) {
    const auto first = history.begin() + static_cast<ptrdiff_t>(size_t{i} * params.history.stride);
    std::vector<const std::byte*> pages(first, first + params.history.stride);
    sequences_.push_back(Must(GpuSequence::Create({.pool = pool_.get()})));
    if (i == 0 || !form_.has_one_prefix) {
      prefix = std::make_shared<BatchPrefix>(windows[size_t{i} * params.windows.stride],
                                             std::move(pages), profile);
    }
    Must(sequences_[i]->Adopt(prefix));
    members_.push_back({sequences_[i].get(), 1});
  }
}

GpuBatch::LayerRows EngineStep::RowsOf(uint32_t layer) const {
  const AppendRowsParams params = rows_.Append(layer, 1);
  return {.queries = params.queries, .keys = params.keys, .values = params.values, .out = out_};
}

void EngineStep::Prefill() {
  for (const auto& sequence : sequences_) {
    const GpuBatch::Member member{sequence.get(), kChunkTokens};
    Must(batch_->BeginStep({.members = {&member, 1}}, stream_));
    for (uint32_t layer = 0; layer < geometry_.num_layers; ++layer) {
      Must(batch_->Layer(layer, RowsOf(layer), stream_));
    }
    Must(batch_->EndStep(stream_));
  }
  CheckCuda(cudaStreamSynchronize(stream_), "waiting for a prefill");
  window_tokens_ = kChunkTokens + pool_->profile().windows().sink_tokens;
}

void EngineStep::Capture() {
  cudaGraph_t graph = nullptr;
  CheckCuda(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), "capturing");
  for (uint32_t layer = 0; layer < geometry_.num_layers; ++layer) {
    Must(form_.reads_it_once
             ? batch_->DecodeSharedLayer(layer, num_sequences_, RowsOf(layer), stream_)
             : batch_->DecodeLayer(layer, num_sequences_, RowsOf(layer), stream_));
  }
  CheckCuda(cudaStreamEndCapture(stream_, &graph), "ending a capture");
  CheckCuda(cudaGraphInstantiate(&graph_, graph, 0), "instantiating a graph");
  CheckCuda(cudaGraphDestroy(graph), "ending a graph");
}

EngineStep::Times EngineStep::Run() {
  using Clock = std::chrono::steady_clock;
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  CheckCuda(cudaEventCreate(&begin), "creating an event");
  CheckCuda(cudaEventCreate(&end), "creating an event");
  std::vector<double> steps, graphs, begins, ends, validations, demoting;
  for (int i = -kWarmSteps; i < kSteps; ++i) {
    const uint32_t free_before = pool_->usage(PageEncoding::kInt2).num_free;
    const auto start = Clock::now();
    Must(batch_->BeginStep({.members = members_, .replayed_rows = num_sequences_}, stream_));
    const auto begun = Clock::now();
    CheckCuda(cudaEventRecord(begin, stream_), "recording an event");
    CheckCuda(cudaGraphLaunch(graph_, stream_), "launching a graph");
    CheckCuda(cudaEventRecord(end, stream_), "recording an event");
    const auto launched = Clock::now();
    Must(batch_->EndStep(stream_));
    const auto ended = Clock::now();
    CheckCuda(cudaStreamSynchronize(stream_), "waiting for a step");
    const auto waited = Clock::now();
    Must(batch_->Validate());
    const auto validated = Clock::now();
    if (i < 0) {
      continue;
    }
    const bool is_demoting = pool_->usage(PageEncoding::kInt2).num_free < free_before;
    (is_demoting ? demoting : steps).push_back(Microseconds(waited - start) / 1000);
    float graph_ms = 0;
    CheckCuda(cudaEventElapsedTime(&graph_ms, begin, end), "reading an event");
    graphs.push_back(double{graph_ms});
    begins.push_back(Microseconds(begun - start));
    ends.push_back(Microseconds(ended - launched));
    validations.push_back(Microseconds(validated - waited));
  }
  Must(batch_->TakeProblem(stream_));
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return {.step_ms = Median(steps),
          .graph_ms = Median(graphs),
          .begin_us = Median(begins),
          .end_us = Median(ends),
          .validate_us = Median(validations),
          .demoting_ms = Median(demoting)};
}

}  // namespace crumb::bench
