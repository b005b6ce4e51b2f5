// SPDX-License-Identifier: Apache-2.0
//
// Times split decode on the shapes that the design names; one layer a launch, all layers in one
// graph. Prints a line of JSON a figure for run.sh.
//
//   decode_gpu_bench [--tune [SHAPE] | --shared | --contexts]
//
//   --tune       other cuts than split decode's own, as a table; of the shape of that name, or all
//   --shared     shared decode only
//   --contexts   the figures for plots over context length only
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "bench/gpu/decode_batch.h"
#include "bench/gpu/gpu_timer.h"
#include "crumb/cuda/shared_decode.h"
#include "crumb/cuda/split_decode.h"
#include "cuda/gpu/decode_grid.h"

namespace crumb::bench {
namespace {

struct NamedShape {
  const char* name;
  uint32_t num_sequences;
  uint32_t history_tokens;
  double goal_ms;
};
constexpr NamedShape kShapes[] = {{"1x32K", 1, 32768, 0.010},
                                  {"1x100K", 1, 99968, 0.020},
                                  {"8x32K", 8, 32768, 0.042},
                                  {"32x32K", 32, 32768, 0.156}};

void CheckStatus(const absl::Status& status) {
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
    std::exit(1);
  }
}

// Milliseconds a layer. A grid without blocks: the op's own.
double Time(const DecodeBatch& batch, const gpu::DecodeGrid& grid, bool is_settled) {
  const uint32_t layers = batch.shape().geometry.num_layers;
  const double milliseconds = GraphMilliseconds([&](cudaStream_t stream) {
    for (uint32_t layer = 0; layer < layers; ++layer) {
      SplitDecodeParams params = batch.Params(layer);
      params.history_is_settled = is_settled;
      CheckStatus(grid.num_blocks == 0 ? SplitDecode(params, stream)
                                       : gpu::SplitDecodeOnGrid(params, grid, stream));
    }
  });
  return milliseconds / layers;
}

void Tune(std::string_view only) {
  struct Cut {
    uint32_t blocks;
    int warps;
    int stages;
    uint32_t team;
  };
  const auto cuts_of = [](uint32_t sequences) -> std::vector<Cut> {
    switch (sequences) {
      case 1:
        return {{128, 8, 2, 1},   {128, 8, 2, 16},  {128, 8, 3, 16},  {128, 8, 4, 16},
                {128, 10, 2, 16}, {128, 12, 2, 16}, {128, 16, 2, 16}, {256, 8, 2, 32}};
      case 8:
        return {{128, 16, 2, 1}, {128, 12, 2, 1}, {128, 10, 2, 1}, {128, 12, 3, 1}, {256, 8, 2, 1}};
      default:
        return {{256, 8, 2, 1}, {128, 16, 2, 1}, {128, 12, 2, 1}};
    }
  };
  for (const NamedShape& shape : kShapes) {
    if (!only.empty() && only != shape.name) {
      continue;
    }
    for (const uint32_t window : {0u, 352u}) {
      const DecodeBatch batch({.num_sequences = shape.num_sequences,
                               .history_tokens = shape.history_tokens,
                               .window_tokens = window});
      const double bytes = batch.HistoryBytes() + batch.WindowBytes();
      std::printf("%s window %u: own %.4f, settled %.4f ms; blocks x warps x stages x team:",
                  shape.name, window, Time(batch, {}, false), Time(batch, {}, true));
      for (const Cut& cut : cuts_of(shape.num_sequences)) {
        const gpu::DecodeGrid grid{cut.blocks, cut.warps, cut.stages, 1, 4, cut.team};
        const double plain = Time(batch, grid, false);
        const double settled = Time(batch, grid, true);
        std::printf("\n  %ux%dx%dx%u %.4f %.4f (%.0f GB/s)", cut.blocks, cut.warps, cut.stages,
                    cut.team, plain, settled, bytes / settled / 1e6);
      }
      std::printf("\n");
      std::fflush(stdout);
    }
  }
}

void Report() {
  for (const NamedShape& shape : kShapes) {
    for (const uint32_t window : {0u, 352u}) {
      const DecodeBatch batch({.num_sequences = shape.num_sequences,
                               .history_tokens = shape.history_tokens,
                               .window_tokens = window});
      for (const bool is_settled : {false, true}) {
        std::printf(
            "{\"op\": \"split_decode\", \"shape\": \"%s\", \"window_tokens\": %u, "
            "\"overlapped\": %s, \"ms\": %.5f, \"bytes\": %.0f, \"goal_ms\": %.3f}\n",
            shape.name, window, is_settled ? "true" : "false", Time(batch, {}, is_settled),
            batch.HistoryBytes() + batch.WindowBytes(), shape.goal_ms);
        std::fflush(stdout);
      }
    }
  }
}

// Over context length, for plots. As many layers as no cache holds.
void ReportContexts() {
  constexpr double kNoCacheBytes = 200e6;
  for (const uint32_t sequences : {1u, 32u}) {
    for (uint32_t context = 1024; context <= 131072; context *= 2) {
      BatchShape shape{.num_sequences = sequences, .history_tokens = context};
      const double layer_bytes =
          static_cast<double>(sequences) * (context / kPageTokens) * shape.geometry.num_kv_heads *
          static_cast<double>(shape.geometry.HeadBlockBytes(PageEncoding::kInt2));
      shape.geometry.num_layers =
          std::clamp<uint32_t>(static_cast<uint32_t>(kNoCacheBytes / layer_bytes), 4, 256);
      const DecodeBatch batch(shape);
      std::printf(
          "{\"op\": \"decode_context\", \"sequences\": %u, \"context\": %u, \"ms\": %.5f, "
          "\"bytes\": %.0f}\n",
          sequences, context, Time(batch, {}, false), batch.HistoryBytes());
      std::fflush(stdout);
    }
  }
}

// The batch's shared tokens as a prefix of the rest.
SharedDecodeParams SharedParams(const DecodeBatch& batch, uint32_t layer) {
  SharedDecodeParams params;
  params.batch = batch.Params(layer);
  params.prefix = params.batch.history;
  params.prefix.stride = batch.shape().shared_tokens / kPageTokens;
  params.prefix_pages = batch.prefix_pages();
  params.batch.history.pages += params.prefix.stride;
  params.batch.history_pages = batch.own_pages();
  return params;
}

// Sequences on one prefix: the batch through split decode, then the same through shared decode.
void ReportShared() {
  constexpr uint32_t kSequences = 32;
  constexpr uint32_t kPrefix = 99968;
  const DecodeBatch batch(
      {.num_sequences = kSequences, .history_tokens = kPrefix + 1024, .shared_tokens = kPrefix});
  const uint32_t layers = batch.shape().geometry.num_layers;
  const double split_ms = Time(batch, {}, false);
  const double shared_ms = GraphMilliseconds([&](cudaStream_t stream) {
                             for (uint32_t layer = 0; layer < layers; ++layer) {
                               CheckStatus(SharedDecode(SharedParams(batch, layer), stream));
                             }
                           }) /
                           layers;
  const char* shape = "32 on 100K+1K";
  const double page_bytes =
      static_cast<double>(batch.shape().geometry.HeadBlockBytes(PageEncoding::kInt2)) *
      batch.shape().geometry.num_kv_heads;
  const double once = page_bytes * (kPrefix + kSequences * 1024) / kPageTokens;
  std::printf("{\"op\": \"split_decode\", \"shape\": \"%s\", \"ms\": %.5f, \"bytes\": %.0f}\n",
              shape, split_ms, batch.HistoryBytes());
  std::printf(
      "{\"op\": \"shared_decode\", \"shape\": \"%s\", \"ms\": %.5f, \"bytes\": %.0f, "
      "\"goal_ms\": %.5f}\n",
      shape, shared_ms, once, split_ms / 8);
}

}  // namespace
}  // namespace crumb::bench

int main(int argc, char** argv) {
  if (const auto device = crumb::CurrentGpu(); !device.ok()) {
    std::fprintf(stderr, "%s\n", std::string(device.status().message()).c_str());
    return 1;
  }
  const double bandwidth = crumb::bench::CopyBandwidth();
  if (argc > 1 && std::strcmp(argv[1], "--tune") == 0) {
    std::printf("copy %.0f GB/s\n", bandwidth);
    crumb::bench::Tune(argc > 2 ? argv[2] : "");
    return 0;
  }
  if (argc > 1 && std::strcmp(argv[1], "--shared") == 0) {
    crumb::bench::ReportShared();
    return 0;
  }
  std::printf("{\"op\": \"copy\", \"gb_per_s\": %.1f}\n", bandwidth);
  if (argc > 1 && std::strcmp(argv[1], "--contexts") == 0) {
    crumb::bench::ReportContexts();
    return 0;
  }
  crumb::bench::Report();
  crumb::bench::ReportShared();
  crumb::bench::ReportContexts();
  return 0;
}
