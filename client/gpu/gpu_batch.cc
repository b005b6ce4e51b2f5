// SPDX-License-Identifier: Apache-2.0
#include "crumb/gpu_batch.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

#include "client/gpu/gpu_batch_impl.h"
#include "proto/base/status_macros.h"

namespace crumb {
namespace {

constexpr uint32_t kMaxStepTokens = 1u << 15;  // AppendRowsParams::num_tokens.
constexpr uint32_t kMaxGroup = 16;             // SplitDecodeParams::num_query_heads.
constexpr uint32_t kMaxLength = 1u << 30;

template <typename Value>
absl::Status BadOption(const char* option, const Value& value, const std::string& limit) {
  return absl::InvalidArgumentError(
      absl::StrCat("GpuBatch::Options::", option, " is ", value, "; it must be ", limit));
}

absl::Status CheckTypes(const GpuBatch::Options& options) {
  if (options.type != ElementType::kBf16 && options.type != ElementType::kFp16) {
    return BadOption("type", static_cast<int>(options.type), "kBf16 (1) or kFp16 (2)");
  }
  const bool is_rotated_back = options.pool->impl().output_heads() != nullptr;
  if (is_rotated_back && options.out_type != options.type) {
    return BadOption("out_type", static_cast<int>(options.out_type),
                     absl::StrCat("type, ", static_cast<int>(options.type),
                                  ", where the pool has outputs rotated back"));
  }
  return absl::OkStatus();
}

absl::Status CheckOptions(const GpuBatch::Options& options) {
  const uint32_t kv_heads = options.pool->heads().count;
  if (options.num_query_heads == 0 || options.num_query_heads % kv_heads != 0 ||
      options.num_query_heads / kv_heads > kMaxGroup) {
    return BadOption("num_query_heads", options.num_query_heads,
                     absl::StrCat("a multiple of the rank's ", kv_heads, " KV heads, at most ",
                                  kMaxGroup, " times as many"));
  }
  if (!std::isfinite(options.scale) || options.scale < 0) {
    return BadOption("scale", options.scale, "positive, or 0 for 1 / sqrt(head_dim)");
  }
  if (options.max_sequences == 0 || options.max_sequences > kMaxStepTokens) {
    return BadOption("max_sequences", options.max_sequences, absl::StrCat("1 to ", kMaxStepTokens));
  }
  if (options.max_tokens < options.max_sequences || options.max_tokens > kMaxStepTokens) {
    return BadOption("max_tokens", options.max_tokens,
                     absl::StrCat("from max_sequences, ", options.max_sequences, ", to ",
                                  kMaxStepTokens, ", or 0 for max_sequences"));
  }
  if (options.max_length == 0 || options.max_length > kMaxLength) {
    return BadOption("max_length", options.max_length, absl::StrCat("1 to ", kMaxLength));
  }
  return CheckTypes(options);
}

// Addresses in one allocation, one buffer after another.
class Layout {
 public:
  size_t Add(size_t bytes) {
    constexpr size_t kAlignment = 256;  // SplitDecodeParams::workspace.
    const size_t offset = bytes_;
    bytes_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    return offset;
  }
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_ = 0;
};

// Pages of windows that a member can have: its sink; rows from the recent window on, which begins
// up to a page before it is due; and the step's own.
StepTables::Shape TableShape(const GpuBatch::Options& options) {
  const Windows& windows = options.pool->profile().windows();
  const auto pages = [](uint32_t tokens) { return (tokens + kPageTokens - 1) / kPageTokens; };
  return {.max_rows = options.max_sequences,
          .max_tokens = options.max_tokens,
          .history_stride = pages(options.max_length),
          .window_stride = pages(windows.sink_tokens) + pages(windows.recent_tokens) + 1 +
                           pages(options.max_tokens)};
}

}  // namespace

GpuBatch::Impl::Impl(const Options& options)
    : options_(options), pool_(options.pool->impl()), shape_(TableShape(options)) {
  members_.reserve(options.max_sequences);
  windows_.reserve(shape_.window_stride);
  num_windows_.reserve(options.max_sequences);
}

// Of decoding any number of rows, with a shared prefix or without.
absl::StatusOr<size_t> GpuBatch::Impl::WorkspaceBytes() const {
  SharedDecodeParams shape;
  shape.batch.num_query_heads = options_.num_query_heads;
  shape.batch.num_kv_heads = geometry().num_kv_heads;
  shape.batch.head_dim = geometry().key_dim;
  shape.prefix.stride = shape_.history_stride;
  size_t most = 0;
  for (uint32_t num_rows = 1; num_rows <= options_.max_sequences; ++num_rows) {
    shape.batch.num_sequences = num_rows;
    CRUMB_ASSIGN_OR_RETURN(const size_t bytes, SharedDecodeWorkspaceBytes(shape));
    most = std::max(most, bytes);
  }
  return most;
}

absl::StatusOr<std::unique_ptr<GpuBatch::Impl>> GpuBatch::Impl::Create(const Options& options) {
  std::unique_ptr<Impl> batch(new Impl(options));
  const ScopedGpu current(batch->gpu());
  CRUMB_RETURN_IF_ERROR(current.status());
  CRUMB_ASSIGN_OR_RETURN(batch->workspace_bytes_, batch->WorkspaceBytes());

  const size_t table_bytes = StepTables::Bytes(batch->shape_);
  const size_t row_bytes = sizeof(uint16_t) * options.num_query_heads * batch->geometry().key_dim;
  const bool is_rotated_back = batch->pool_.output_heads() != nullptr;
  Layout layout;
  layout.Add(table_bytes);
  const size_t queries = layout.Add(options.max_tokens * row_bytes);
  const size_t attended = layout.Add(is_rotated_back ? options.max_tokens * row_bytes : 0);
  const size_t left_out = layout.Add(sizeof(uint64_t));
  const size_t null_pages = layout.Add(sizeof(uint64_t));
  const size_t workspace = layout.Add(batch->workspace_bytes_);

  CRUMB_ASSIGN_OR_RETURN(batch->host_, OwnPinnedMemory::Create(table_bytes));
  auto device = OwnGpuMemory::Create(layout.bytes());
  if (!device.ok()) {
    return absl::Status(
        device.status().code(),
        absl::StrCat("tables and buffers of a batch of ", options.max_sequences, " sequences of ",
                     options.max_length, " tokens: ", device.status().message()));
  }
  batch->device_ = *std::move(device);
  batch->tables_ = std::make_unique<StepTables>(batch->shape_, batch->host_->data());
  batch->rotated_queries_ = batch->OnDevice<void>(queries);
  batch->attended_ = is_rotated_back ? batch->OnDevice<void>(attended) : nullptr;
  batch->tokens_left_out_ = batch->OnDevice<uint64_t>(left_out);
  batch->null_pages_ = batch->OnDevice<uint64_t>(null_pages);
  batch->workspace_ = batch->OnDevice<std::byte>(workspace);
  CRUMB_ASSIGN_OR_RETURN(batch->copied_, OwnGpuEvent::Create());
  CRUMB_ASSIGN_OR_RETURN(const std::unique_ptr<OwnGpuStream> stream, OwnGpuStream::Create());
  CRUMB_RETURN_IF_ERROR(ClearGpu(batch->device_->data(), batch->device_->bytes(), stream->get()));
  CRUMB_RETURN_IF_ERROR(stream->Wait());
  return batch;
}

absl::StatusOr<std::unique_ptr<GpuBatch>> GpuBatch::Create(const Options& options) {
  if (options.pool == nullptr) {
    return BadOption("pool", "null", "the pool that the sequences take their pages from");
  }
  Options complete = options;
  if (complete.max_tokens == 0) {
    complete.max_tokens = complete.max_sequences;
  }
  CRUMB_RETURN_IF_ERROR(CheckOptions(complete));
  if (complete.scale == 0) {
    const uint32_t dim = options.pool->profile().geometry().key_dim;
    complete.scale = 1.0f / std::sqrt(static_cast<float>(dim));
  }
  CRUMB_ASSIGN_OR_RETURN(std::unique_ptr<Impl> impl, Impl::Create(complete));
  return std::unique_ptr<GpuBatch>(new GpuBatch(std::move(impl)));
}

GpuBatch::GpuBatch(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
GpuBatch::~GpuBatch() = default;

absl::Status GpuBatch::BeginStep(const Step& step, GpuStream stream) {
  return impl_->BeginStep(step, stream);
}
absl::Status GpuBatch::Layer(uint32_t layer, const LayerRows& rows, GpuStream stream) {
  return impl_->Layer(layer, rows, stream);
}
absl::Status GpuBatch::DecodeLayer(uint32_t layer,
                                   uint32_t num_rows,
                                   const LayerRows& rows,
                                   GpuStream stream) {
  return impl_->DecodeLayer(layer, num_rows, /*reads_prefix_once=*/false, rows, stream);
}
absl::Status GpuBatch::DecodeSharedLayer(uint32_t layer,
                                         uint32_t num_rows,
                                         const LayerRows& rows,
                                         GpuStream stream) {
  return impl_->DecodeLayer(layer, num_rows, /*reads_prefix_once=*/true, rows, stream);
}
bool GpuBatch::shares_prefix() const {
  return impl_->shares_prefix();
}
absl::Status GpuBatch::EndStep(GpuStream stream) {
  return impl_->EndStep(stream);
}
void GpuBatch::AbandonStep() {
  impl_->AbandonStep();
}
absl::Status GpuBatch::Validate() const {
  return impl_->Validate();
}
absl::Status GpuBatch::TakeProblem(GpuStream stream) {
  return impl_->TakeProblem(stream);
}

}  // namespace crumb
