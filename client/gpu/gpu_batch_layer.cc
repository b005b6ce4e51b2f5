// SPDX-License-Identifier: Apache-2.0
//
// What a layer enqueues: append_rows, attention of decoded rows and of chunks, outputs rotated
// back.
#include <utility>

#include "absl/strings/str_cat.h"

#include "client/gpu/gpu_batch_impl.h"
#include "proto/base/status_macros.h"

namespace crumb {

absl::Status GpuBatch::Impl::CheckLayer(const char* call,
                                        uint32_t layer,
                                        const LayerRows& rows) const {
  const uint32_t num_layers = geometry().num_layers;
  if (layer >= num_layers) {
    return absl::InvalidArgumentError(absl::StrCat(call, " of layer ", layer, "; the model has ",
                                                   num_layers, " layers, counted from 0"));
  }
  // The ops take less: append_rows queries without keys, to rotate outputs back.
  const std::pair<const char*, const void*> all[] = {{"queries.data", rows.queries.data},
                                                     {"keys.data", rows.keys.data},
                                                     {"values.data", rows.values.data},
                                                     {"out", rows.out}};
  for (const auto& [name, data] : all) {
    if (data == nullptr) {
      return absl::InvalidArgumentError(absl::StrCat(
          call, " of layer ", layer, ": LayerRows::", name, " is null; a layer has all four"));
    }
  }
  return absl::OkStatus();
}

absl::Status GpuBatch::Impl::Layer(uint32_t layer, const LayerRows& rows, GpuStream stream) {
  if (!is_open_ || is_replayed_) {
    return absl::FailedPreconditionError(
        is_open_ ? "Layer in a step whose layers are replayed; begin it without replayed_rows"
                 : "Layer with no step open; call BeginStep first");
  }
  CRUMB_RETURN_IF_ERROR(CheckLayer("Layer", layer, rows));
  if (enqueued_[layer]) {
    return absl::FailedPreconditionError(
        absl::StrCat("layer ", layer, " of this step was enqueued already"));
  }
  const ScopedGpu current(gpu());
  CRUMB_RETURN_IF_ERROR(current.status());
  for (const Member& member : members_) {
    CRUMB_RETURN_IF_ERROR(member.sequence->impl().DelayUntilLayer(layer, stream));
  }
  AppendRowsParams append = Append(layer, rows, tables_->num_tokens());
  append.sequences = OnDevice<uint32_t>(tables_->token_rows_offset());
  CRUMB_RETURN_IF_ERROR(AppendRows(append, stream));
  if (num_decoded_ > 0) {
    SplitDecodeParams decode = Decode(layer, num_decoded_, Attended(rows.out));
    decode.history_is_settled = history_tokens_ >= kLongHistoryTokens;
    CRUMB_RETURN_IF_ERROR(EnqueueDecode(decode, layer, reads_prefix_once_, stream));
  }
  uint32_t first_token = num_decoded_;
  for (uint32_t i = num_decoded_; i < members_.size(); ++i) {
    CRUMB_RETURN_IF_ERROR(
        PrefillAttention(Prefill(layer, i, first_token, Attended(rows.out)), stream));
    first_token += members_[i].num_tokens;
  }
  CRUMB_RETURN_IF_ERROR(FinishOutputs(layer, tables_->num_tokens(), rows.out, stream));
  enqueued_[layer] = true;
  return absl::OkStatus();
}

absl::Status GpuBatch::Impl::DecodeLayer(uint32_t layer,
                                         uint32_t num_rows,
                                         bool reads_prefix_once,
                                         const LayerRows& rows,
                                         GpuStream stream) {
  CRUMB_RETURN_IF_ERROR(
      CheckLayer(reads_prefix_once ? "DecodeSharedLayer" : "DecodeLayer", layer, rows));
  if (num_rows == 0 || num_rows > options_.max_sequences) {
    return absl::InvalidArgumentError(absl::StrCat("num_rows is ", num_rows, "; it must be 1 to ",
                                                   options_.max_sequences,
                                                   ", GpuBatch::Options::max_sequences"));
  }
  const ScopedGpu current(gpu());
  CRUMB_RETURN_IF_ERROR(current.status());
  // Token i is of row i.
  CRUMB_RETURN_IF_ERROR(AppendRows(Append(layer, rows, num_rows), stream));
  SplitDecodeParams decode = Decode(layer, num_rows, Attended(rows.out));
  decode.history_is_settled = options_.captures_long_history;
  CRUMB_RETURN_IF_ERROR(EnqueueDecode(decode, layer, reads_prefix_once, stream));
  return FinishOutputs(layer, num_rows, rows.out, stream);
}

absl::Status GpuBatch::Impl::EnqueueDecode(const SplitDecodeParams& params,
                                           uint32_t layer,
                                           bool reads_prefix_once,
                                           GpuStream stream) const {
  if (!reads_prefix_once) {
    return SplitDecode(params, stream);
  }
  SharedDecodeParams shared{.batch = params, .prefix = History(layer, 0), .prefix_pages = nullptr};
  shared.batch.history_pages = OnDevice<uint32_t>(tables_->own_pages_offset());
  shared.batch.history_is_settled = false;
  shared.prefix.pages = OnDevice<const std::byte* const>(tables_->prefix_offset());
  shared.prefix_pages = OnDevice<uint32_t>(tables_->prefix_pages_offset());
  return SharedDecode(shared, stream);
}

AppendRowsParams GpuBatch::Impl::Append(uint32_t layer,
                                        const LayerRows& rows,
                                        uint32_t num_tokens) const {
  AppendRowsParams params;
  params.heads = pool_.device_heads();
  params.layer = layer;
  params.num_kv_heads = geometry().num_kv_heads;
  params.num_query_heads = options_.num_query_heads;
  params.num_tokens = num_tokens;
  params.type = options_.type;
  params.queries = rows.queries;
  params.keys = rows.keys;
  params.values = rows.values;
  params.rotated_queries = rotated_queries_;
  params.pages = OnDevice<std::byte* const>(tables_->windows_offset());
  params.num_sequences = options_.max_sequences;
  params.stride = shape_.window_stride;
  params.block_offset = geometry().HeadBlockOffset(PageEncoding::kBf16, layer, 0);
  params.head_stride = geometry().HeadRangeBytes(PageEncoding::kBf16);
  params.slots = OnDevice<uint32_t>(tables_->slots_offset());
  params.tokens_left_out = tokens_left_out_;
  return params;
}

DevicePageTable GpuBatch::Impl::History(uint32_t layer, uint32_t row) const {
  return {.pages = OnDevice<const std::byte* const>(tables_->history_offset(row)),
          .stride = shape_.history_stride,
          .block_offset = geometry().HeadBlockOffset(PageEncoding::kInt2, layer, 0),
          .head_stride = geometry().HeadRangeBytes(PageEncoding::kInt2)};
}

DevicePageTable GpuBatch::Impl::Windows(uint32_t layer, uint32_t row) const {
  return {.pages = OnDevice<const std::byte* const>(tables_->windows_offset(row)),
          .stride = shape_.window_stride,
          .block_offset = geometry().HeadBlockOffset(PageEncoding::kBf16, layer, 0),
          .head_stride = geometry().HeadRangeBytes(PageEncoding::kBf16)};
}

SplitDecodeParams GpuBatch::Impl::Decode(uint32_t layer, uint32_t num_rows, void* out) const {
  SplitDecodeParams params;
  params.num_sequences = num_rows;
  params.num_query_heads = options_.num_query_heads;
  params.num_kv_heads = geometry().num_kv_heads;
  params.head_dim = geometry().key_dim;
  params.scale = options_.scale;
  params.query_type = options_.type;
  params.out_type = options_.out_type;
  params.queries = rotated_queries_;
  params.out = out;
  params.history = History(layer, 0);
  params.history_pages = OnDevice<uint32_t>(tables_->history_pages_offset());
  params.windows = Windows(layer, 0);
  params.window_tokens = OnDevice<uint32_t>(StepTables::window_tokens_offset());
  params.workspace = workspace_;
  params.workspace_bytes = workspace_bytes_;
  return params;
}

PrefillAttentionParams GpuBatch::Impl::Prefill(uint32_t layer,
                                               uint32_t index,
                                               uint32_t first_token,
                                               void* out) const {
  const GpuSequence::Impl& sequence = members_[index].sequence->impl();
  const GpuPageTable& pages = sequence.pages();
  const size_t row = size_t{options_.num_query_heads} * geometry().key_dim;
  const uint32_t num_tokens = sequence.length() + members_[index].num_tokens;
  PrefillAttentionParams params;
  params.num_queries = members_[index].num_tokens;
  params.num_query_heads = options_.num_query_heads;
  params.num_kv_heads = geometry().num_kv_heads;
  params.head_dim = geometry().key_dim;
  params.scale = options_.scale;
  params.query_type = options_.type;
  params.queries =
      static_cast<const std::byte*>(rotated_queries_) + first_token * row * sizeof(uint16_t);
  params.out_type = options_.out_type;
  params.out = static_cast<std::byte*>(out) + first_token * row * ElementBytes(options_.out_type);
  params.history = History(layer, index);
  params.history_pages = static_cast<uint32_t>(pages.history().size());
  params.history.stride = params.history_pages;
  params.windows = Windows(layer, index);
  params.windows.stride = num_windows_[index];
  params.window_tokens = num_tokens - (pages.num_pages() - num_windows_[index]) * kPageTokens;
  params.null_pages = null_pages_;
  return params;
}

absl::Status GpuBatch::Impl::FinishOutputs(uint32_t layer,
                                           uint32_t num_tokens,
                                           void* out,
                                           GpuStream stream) const {
  if (attended_ == nullptr) {
    return absl::OkStatus();
  }
  AppendRowsParams params;
  params.heads = *pool_.output_heads();
  params.layer = layer;
  params.num_kv_heads = geometry().num_kv_heads;
  params.num_query_heads = options_.num_query_heads;
  params.num_tokens = num_tokens;
  params.type = options_.type;
  params.queries = {
      .data = attended_,
      .token_stride = sizeof(uint16_t) * options_.num_query_heads * geometry().key_dim};
  params.rotated_queries = out;
  return AppendRows(params, stream);
}

absl::Status GpuBatch::Impl::TakeProblem(GpuStream stream) {
  const ScopedGpu current(gpu());
  CRUMB_RETURN_IF_ERROR(current.status());
  CRUMB_RETURN_IF_ERROR(CheckStream(stream));
  // Parameters that validate; launches are told by the words that they left.
  const LayerRows rows{.queries = {rotated_queries_, 16},
                       .keys = {rotated_queries_, 16},
                       .values = {rotated_queries_, 16},
                       .out = rotated_queries_};
  const auto internal = [](const absl::Status& status) {
    return absl::IsInvalidArgument(status) ? absl::InternalError(status.message()) : status;
  };
  CRUMB_RETURN_IF_ERROR(
      internal(TakeAppendRowsProblem(Append(0, rows, options_.max_sequences), stream)));
  const SplitDecodeParams decode = Decode(0, options_.max_sequences, rotated_queries_);
  CRUMB_RETURN_IF_ERROR(internal(TakeSplitDecodeProblem(decode, stream)));
  PrefillAttentionParams prefill;
  prefill.num_queries = prefill.window_tokens = 1;
  prefill.num_query_heads = decode.num_query_heads;
  prefill.num_kv_heads = decode.num_kv_heads;
  prefill.head_dim = decode.head_dim;
  prefill.queries = decode.queries;
  prefill.out = decode.out;
  prefill.windows = decode.windows;
  prefill.null_pages = null_pages_;
  return internal(TakePrefillAttentionProblem(prefill, stream));
}

}  // namespace crumb
