// SPDX-License-Identifier: Apache-2.0
//
// Times what one decode step of an 8B model asks of Crumb's kernels: in all 36 layers, the new
// tokens' rows and queries are rotated and stored (append_rows), then attention reads history and
// windows (split_decode), as one CUDA graph. Prints a line of JSON a figure for run.sh.
//
// Twice: the bare ops on tables that never change, and the step of an engine through GpuBatch, with
// the host's part of it. What lies between layers in an engine, its matrix products, is not here.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "bench/gpu/codec_pages.h"
#include "bench/gpu/decode_batch.h"
#include "bench/gpu/engine_step.h"
#include "bench/gpu/gpu_timer.h"
#include "crumb/cuda/append_rows.h"
#include "crumb/cuda/split_decode.h"
#include "tests/support/test_profile.h"

namespace crumb::bench {
namespace {

constexpr Geometry kModel{36, 8, 128, 128};
constexpr uint32_t kWindowTokens = 352;  // Sink 64, recent window 256 and half a page.

struct NamedShape {
  const char* name;
  uint32_t num_sequences;
  uint32_t history_tokens;
};
constexpr NamedShape kShapes[] = {
    {"1x32K", 1, 32768}, {"1x100K", 1, 99968}, {"8x32K", 8, 32768}, {"32x32K", 32, 32768}};

void CheckStatus(const absl::Status& status) {
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
    std::exit(1);
  }
}

// One layer's new rows into the batch's windows, and its queries where attention takes them from.
AppendRowsParams AppendParams(const CodecPages& pages,
                              const DecodeBatch& batch,
                              const SplitDecodeParams& attention,
                              uint32_t layer) {
  AppendRowsParams params = pages.Append(layer, batch.shape().num_sequences);
  params.rotated_queries = const_cast<void*>(attention.queries);
  params.pages = const_cast<std::byte* const*>(attention.windows.pages);
  params.stride = attention.windows.stride;
  params.block_offset = attention.windows.block_offset;
  params.head_stride = attention.windows.head_stride;
  return params;
}

// Those of one step, and what to call them.
void ReportEngine(const std::string& shape,
                  const EngineStep::Form& form,
                  const DecodeBatch& batch,
                  const CodecPages& pages,
                  const std::shared_ptr<const Profile>& profile,
                  const std::string& bytes) {
  EngineStep engine(batch, pages, profile, form);
  const EngineStep::Times times = engine.Run();
  std::printf(
      "{\"op\": \"engine_step\", \"shape\": \"%s\", \"window_tokens\": %u, \"ms\": %.4f, "
      "\"graph_ms\": %.4f, \"begin_us\": %.1f, \"end_us\": %.1f, \"validate_us\": %.1f, "
      "\"demoting_ms\": %.4f, %s}\n",
      shape.c_str(), engine.window_tokens(), times.step_ms, times.graph_ms, times.begin_us,
      times.end_us, times.validate_us, times.demoting_ms, bytes.c_str());
  std::fflush(stdout);
}

// 32 sequences on one prefix of 100,000 tokens.
void ReportSharedPrefix(const CodecPages& pages, const std::shared_ptr<const Profile>& profile) {
  constexpr uint32_t kSequences = 32;
  constexpr uint32_t kTokens = 99968;
  const DecodeBatch batch({.num_sequences = kSequences,
                           .history_tokens = kTokens,
                           .window_tokens = kWindowTokens,
                           .shared_tokens = kTokens,
                           .geometry = kModel});
  const double bytes =
      kModel.num_layers * (batch.HistoryBytes() / kSequences + batch.WindowBytes());
  char text[64];
  std::snprintf(text, sizeof(text), "\"bytes\": %.0f", bytes);
  for (const bool reads_it_once : {false, true}) {
    ReportEngine(reads_it_once ? "32 on one prefix of 100K, read once, 36 layers"
                               : "32 on one prefix of 100K, 36 layers",
                 {.has_one_prefix = true, .reads_it_once = reads_it_once}, batch, pages, profile,
                 text);
  }
}

void Report(const NamedShape& shape,
            const CodecPages& pages,
            const std::shared_ptr<const Profile>& profile,
            double copy) {
  const DecodeBatch batch({.num_sequences = shape.num_sequences,
                           .history_tokens = shape.history_tokens,
                           .window_tokens = kWindowTokens,
                           .geometry = kModel});
  // A rotation is 16 bits of K's matrix and of V's, in two parts, for each head.
  const double rotations = 2.0 * 4 * kModel.num_kv_heads * kModel.key_dim * kModel.key_dim;
  const double bytes = kModel.num_layers * (batch.HistoryBytes() + batch.WindowBytes() + rotations);
  for (const bool is_settled : {false, true}) {
    const double ms = GraphMilliseconds([&](cudaStream_t stream) {
      for (uint32_t layer = 0; layer < kModel.num_layers; ++layer) {
        SplitDecodeParams attention = batch.Params(layer);
        attention.history_is_settled = is_settled;
        CheckStatus(AppendRows(AppendParams(pages, batch, attention, layer), stream));
        CheckStatus(SplitDecode(attention, stream));
      }
    });
    CheckStatus(TakeSplitDecodeProblem(batch.Params(0), nullptr));
    std::printf(
        "{\"op\": \"decode_step\", \"shape\": \"%s, 36 layers\", \"window_tokens\": %u, "
        "\"overlapped\": %s, \"ms\": %.4f, \"bytes\": %.0f, \"roofline_ms\": %.4f}\n",
        shape.name, kWindowTokens, is_settled ? "true" : "false", ms, bytes, bytes / copy / 1e6);
    std::fflush(stdout);
  }
  char text[96];
  std::snprintf(text, sizeof(text), "\"bytes\": %.0f, \"roofline_ms\": %.4f", bytes,
                bytes / copy / 1e6);
  const std::string name = std::string(shape.name) + ", 36 layers";
  ReportEngine(name, {}, batch, pages, profile, text);
  ReportEngine(name + ", outputs rotated back", {.keeps_outputs_rotated = false}, batch, pages,
               profile, text);
}

}  // namespace
}  // namespace crumb::bench

int main() {
  if (const auto device = crumb::CurrentGpu(); !device.ok()) {
    std::fprintf(stderr, "%s\n", std::string(device.status().message()).c_str());
    return 1;
  }
  const double copy = crumb::bench::CopyBandwidth();
  std::printf("{\"op\": \"copy\", \"gb_per_s\": %.1f}\n", copy);
  const crumb::bench::CodecPages pages(crumb::bench::kModel, crumb::CodecId::kOscarInt2, 1);
  const auto profile = crumb::MakeTestProfile(
      {.geometry = crumb::bench::kModel, .windows = {}, .rotation_per_layer = true});
  for (const auto& shape : crumb::bench::kShapes) {
    crumb::bench::Report(shape, pages, profile, copy);
  }
  crumb::bench::ReportSharedPrefix(pages, profile);
  return 0;
}
