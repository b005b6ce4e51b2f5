// SPDX-License-Identifier: Apache-2.0
//
// Times the page ops on all layers of 8,192 tokens of an 8B model (36 layers, 8 KV heads, head_dim
// 128), append_rows and prefill attention. Prints a line of JSON a figure for run.sh: milliseconds,
// the bytes that must move, and the goal, most of them a share of this machine's copy bandwidth.
#include <cstdio>
#include <cstdlib>
#include <string>

#include "bench/gpu/codec_pages.h"
#include "bench/gpu/gpu_timer.h"
#include "crumb/cuda/demote_pages.h"

namespace crumb::bench {
namespace {

constexpr Geometry kModel{36, 8, 128, 128};
constexpr uint32_t kTokens = 8192;

// Operations of the prefill that the demotion follows: two a weight and token, and attention's
// 4 * layers * query heads * head_dim a pair of tokens, of which causality leaves half.
constexpr double kPrefillFlops =
    2 * 8.2e9 * kTokens + 4.0 * 36 * 32 * 128 * (double{kTokens} * kTokens / 2);

void CheckStatus(const absl::Status& status) {
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
    std::exit(1);
  }
}

// `goal` is of copy bandwidth.
void Print(const char* op, const char* shape, double ms, double bytes, double copy, double goal) {
  std::printf(
      "{\"op\": \"%s\", \"shape\": \"%s\", \"ms\": %.5f, \"bytes\": %.0f, \"goal_ms\": %.5f}\n", op,
      shape, ms, bytes, bytes / (copy * goal) / 1e6);
  std::fflush(stdout);
}

void TimeDemotion(double copy) {
  for (const CodecId codec : kCodecs) {
    const CodecPages pages(kModel, codec, kTokens / kPageTokens);
    for (const bool rotated : {false, true}) {
      DemotePagesParams params = pages.Demotion();
      params.rows_are_rotated = rotated;
      const double ms = GraphMilliseconds(
          [&](cudaStream_t stream) { CheckStatus(DemotePages(params, stream)); }, 11);
      CheckStatus(TakeDemotePagesProblem(params, nullptr));
      const std::string what = std::string(CodecName(codec)) + " 36 layers x 8192 tokens";
      Print(rotated ? "demote_rotated" : "demote", what.c_str(), ms,
            pages.Bf16Bytes() + pages.Int2Bytes(), copy, rotated ? 0.6 : 0.5);
      if (HasFeedback(codec) && !rotated) {
        // At 600 TFLOP/s, three quarters of the matrix rate measured on an H200.
        const double prefill_ms = kPrefillFlops / 600e12 * 1e3;
        std::printf(
            "{\"op\": \"demote\", \"shape\": \"%s of its prefill\", \"prefill_tflop\": %.1f, "
            "\"prefill_ms_at_600_tflops\": %.1f, \"share\": %.5f, \"goal\": 0.005}\n",
            what.c_str(), kPrefillFlops / 1e12, prefill_ms, ms / prefill_ms);
      }
    }
  }
}

// Of pages that demotion has just written.
void TimeOthers(double copy) {
  const CodecPages pages(kModel, CodecId::kOscarInt2, kTokens / kPageTokens);
  CheckStatus(DemotePages(pages.Demotion(), nullptr));
  for (const ExpandSpace space : {ExpandSpace::kRotated, ExpandSpace::kModel}) {
    ExpandPagesParams params = pages.Expansion();
    params.space = space;
    const double ms = GraphMilliseconds(
        [&](cudaStream_t stream) { CheckStatus(ExpandPages(params, stream)); }, 11);
    CheckStatus(TakeExpandPagesProblem(params, nullptr));
    Print("expand",
          space == ExpandSpace::kModel ? "36 layers x 8192 tokens, rotated back"
                                       : "36 layers x 8192 tokens, as stored",
          ms, pages.Bf16Bytes() + pages.Int2Bytes(), copy, 0.75);
  }
  const double ms = GraphMilliseconds(
      [&](cudaStream_t stream) { CheckStatus(ChecksumPages(pages.Checksum(), stream)); }, 25);
  Print("checksum", "128 pages x 8 heads of 36 layers", ms, pages.Int2Bytes(), copy, 0.75);
  for (const uint32_t sequences : {1u, 32u, 128u}) {
    const double layers = GraphMilliseconds([&](cudaStream_t stream) {
      for (uint32_t layer = 0; layer < kModel.num_layers; ++layer) {
        CheckStatus(AppendRows(pages.Append(layer, sequences), stream));
      }
    });
    // The rotations of K and V, which every launch reads anew.
    const double bytes = 2.0 * 4 * kModel.num_kv_heads * kModel.key_dim * kModel.key_dim;
    std::printf(
        "{\"op\": \"append_rows\", \"shape\": \"%u sequences, one of 36 layers\", \"ms\": %.5f, "
        "\"bytes\": %.0f, \"goal_ms\": 0.004}\n",
        sequences, layers / kModel.num_layers, bytes);
    std::fflush(stdout);
  }
}

// One layer; the rate counts what causality leaves.
void TimePrefill() {
  constexpr uint32_t kQueries = 2048;
  constexpr uint32_t kPrefix = 32768;
  const CodecPages pages({4, 8, 128, 128}, CodecId::kOscarInt2, kPrefix / kPageTokens);
  CheckStatus(DemotePages(pages.Demotion(), nullptr));
  const double ms = GraphMilliseconds(
                        [&](cudaStream_t stream) {
                          for (uint32_t layer = 0; layer < 4; ++layer) {
                            CheckStatus(PrefillAttention(pages.Prefill(layer, kQueries), stream));
                          }
                        },
                        7) /
                    4;
  const double flops = 4.0 * 32 * 128 * kQueries * (kPrefix + kPageTokens + kQueries / 2.0);
  std::printf(
      "{\"op\": \"prefill_attention\", \"shape\": \"2K over 32K\", \"ms\": %.4f, "
      "\"bytes\": %.0f, \"tflops\": %.1f}\n",
      ms, pages.Int2Bytes() / 4, flops / ms / 1e9);
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
  crumb::bench::TimeDemotion(copy);
  crumb::bench::TimeOthers(copy);
  crumb::bench::TimePrefill();
  return 0;
}
