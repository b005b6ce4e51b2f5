// SPDX-License-Identifier: Apache-2.0
#include "crumb/cuda/split_attention.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <vector>

#include "absl/strings/str_cat.h"

#include "cuda/cpu/split_attention_kernel.h"
#include "cuda/reference/split_attention.h"
#include "proto/base/check.h"
#include "proto/base/status_macros.h"
#include "proto/page/page_format.h"

namespace crumb {
namespace {

constexpr uint32_t kMaxGroup = 64;
constexpr uintptr_t kBlockAlignment = 16;

absl::Status CheckHeadDim(const char* name, uint32_t dim) {
  if (IsValidHeadDim(dim)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat(name, " is ", dim, "; it must be a multiple of 32 from 32 to ", kMaxHeadDim));
}

absl::Status CheckWindows(const SplitAttentionParams& params) {
  uint64_t num_tokens = 0;
  for (size_t i = 0; i < params.windows.size(); ++i) {
    const Bf16Rows& rows = params.windows[i];
    if (rows.num_tokens > 0 && (rows.keys == nullptr || rows.values == nullptr)) {
      return absl::InvalidArgumentError(
          absl::StrCat("windows[", i, "] has ", rows.num_tokens, " tokens but a null ",
                       rows.keys == nullptr ? "keys" : "values", "; point it at their rows"));
    }
    num_tokens += rows.num_tokens;
  }
  if (params.num_queries == 0 || params.num_queries > num_tokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("num_queries is ", params.num_queries, "; it must be from 1 to the ",
                     num_tokens, " tokens of windows, whose last rows belong to the queries"));
  }
  return absl::OkStatus();
}

absl::Status Check(const SplitAttentionParams& params) {
  CRUMB_RETURN_IF_ERROR(CheckHeadDim("key_dim", params.key_dim));
  CRUMB_RETURN_IF_ERROR(CheckHeadDim("value_dim", params.value_dim));
  if (params.group == 0 || params.group > kMaxGroup) {
    return absl::InvalidArgumentError(absl::StrCat(
        "group is ", params.group, "; it must be from 1 to ", kMaxGroup, " query heads a KV head"));
  }
  if (!std::isfinite(params.scale)) {
    return absl::InvalidArgumentError(
        absl::StrCat("scale is ", params.scale, "; it must be finite, usually 1 / sqrt(key_dim)"));
  }
  if (params.queries == nullptr || params.out == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat(params.queries == nullptr ? "queries" : "out",
                     " is null; it must point at num_queries * group rows"));
  }
  for (size_t i = 0; i < params.history.size(); ++i) {
    const auto address = reinterpret_cast<uintptr_t>(params.history[i]);
    if (address == 0 || address % kBlockAlignment != 0) {
      return absl::InvalidArgumentError(absl::StrCat("history[", i, "] is at address ", address,
                                                     "; a head block must be ", kBlockAlignment,
                                                     "-byte aligned and not null"));
    }
  }
  return CheckWindows(params);
}

const cpu::SplitAttentionFunctions& FunctionsOf(CpuPath path) {
#if defined(__x86_64__)
  if (path == CpuPath::kAvx512) {
    return cpu::Avx512SplitAttentionFunctions();
  }
  if (path == CpuPath::kAvx2) {
    return cpu::Avx2SplitAttentionFunctions();
  }
#endif
  CRUMB_CHECK(path == CpuPath::kPortable, "this path is not in the build");
  return cpu::PortableSplitAttentionFunctions();
}

constexpr float kLog2E = 1.44269504f;
constexpr float kLn2 = 0.693147181f;

// One call on a fast path: windows tile by tile, then history page by page, each against all chunks
// of rows, so that what is read of the cache is read once.
class FastAttention {
 public:
  FastAttention(const SplitAttentionParams& params, const cpu::SplitAttentionFunctions& functions)
      : params_(params),
        functions_(functions),
        num_rows_(size_t{params.num_queries} * params.group),
        num_chunks_((num_rows_ + cpu::kChunkRows - 1) / cpu::kChunkRows),
        states_(num_chunks_) {
    for (cpu::ChunkState& state : states_) {
      state = {};
      std::fill(std::begin(state.max), std::end(state.max),
                -std::numeric_limits<float>::infinity());
      std::copy(std::begin(state.max), std::end(state.max), std::begin(state.expected));
    }
    outputs_.resize(num_chunks_ * cpu::kChunkRows * params.value_dim);
  }

  // Windows first: sink and recent tokens often have most of the probability, and the more of it is
  // known, the less exactly the history must be read.
  void Run() {
    AttendWindows();
    if (!params_.history.empty()) {
      AttendHistory();
    }
    StoreResults();
  }

 private:
  size_t RowsOfChunk(size_t chunk) const {
    return std::min(cpu::kChunkRows, num_rows_ - chunk * cpu::kChunkRows);
  }

  void AttendHistory() {
    const size_t key_dim = params_.key_dim;
    const size_t value_dim = params_.value_dim;
    const size_t digit_lines = key_dim / 4 * cpu::kChunkRows / 16;
    std::vector<CacheLine> digits(num_chunks_ * 2 * digit_lines);
    std::vector<cpu::FixedQueries> queries(num_chunks_);
    for (size_t chunk = 0; chunk < num_chunks_; ++chunk) {
      CacheLine* first = digits.data() + chunk * 2 * digit_lines;
      FixQueries(chunk, first->words, first[digit_lines].words, queries[chunk]);
    }
    const size_t outputs_of_chunk = cpu::kChunkRows * cpu::PaddedValueDim(value_dim);
    std::vector<float> outputs(num_chunks_ * outputs_of_chunk);
    const std::vector<cpu::ChunkState> before = states_;
    functions_.attend_history({.key_dim = key_dim,
                               .value_dim = value_dim,
                               .pages = params_.history.data(),
                               .num_pages = params_.history.size(),
                               .num_rows = num_rows_,
                               .queries = queries.data(),
                               .states = states_.data(),
                               .outputs = outputs.data()});
    for (size_t row = 0; row < num_rows_; ++row) {
      const cpu::ChunkState& state = states_[row / cpu::kChunkRows];
      const size_t r = row % cpu::kChunkRows;
      const float old_max = before[row / cpu::kChunkRows].max[r];
      const float decay = std::isinf(old_max) ? 0 : std::exp2(old_max - state.max[r]);
      const float* from = outputs.data() + row * cpu::PaddedValueDim(value_dim);
      float* to = outputs_.data() + row * value_dim;
      for (size_t i = 0; i < cpu::PaddedValueDim(value_dim); ++i) {
        const size_t channel = cpu::ChannelOfOutput(i);
        if (channel < value_dim) {
          to[channel] = to[channel] * decay + from[i] + state.offset[r];
        }
      }
    }
  }

  // The chunk's queries as integers of at most kMaxInteger, in two signed digits.
  void FixQueries(size_t chunk,
                  int32_t* digit0,
                  int32_t* digit1,
                  cpu::FixedQueries& queries) const {
    constexpr float kMaxInteger = 127 * 256;
    const size_t key_dim = params_.key_dim;
    queries.digits[0] = digit0;
    queries.digits[1] = digit1;
    for (size_t r = 0; r < RowsOfChunk(chunk); ++r) {
      const float* query = params_.queries + (chunk * cpu::kChunkRows + r) * key_dim;
      float largest = 0;
      for (size_t channel = 0; channel < key_dim; ++channel) {
        largest = std::max(largest, std::fabs(query[channel] * 0 + query[channel]));
      }
      const float unit = largest / kMaxInteger;
      queries.units[r] = 256 * unit * std::fabs(params_.scale) * kLog2E;
      // Rounding is off by 0.29 at random, codes deviate from their mean by 1.1.
      queries.errors[r] = 0.32f * std::sqrt(static_cast<float>(key_dim)) * queries.units[r];
      const bool usable = unit > 0 && std::isfinite(unit);
      int32_t sums[2] = {0, 0};
      for (size_t channel = 0; channel < key_dim && usable; ++channel) {
        const float value = params_.scale < 0 ? -query[channel] : query[channel];
        const auto integer = static_cast<int32_t>(std::lrint(value / unit));
        const int32_t low = ((integer + 128) & 255) - 128;
        const int32_t high = (integer - low) / 256;
        sums[0] += high;
        sums[1] += low;
        const size_t word = (channel / 32 * 4 + channel % 16 / 4) * 2 + channel % 32 / 16;
        const size_t at = (word * cpu::kChunkRows + r) * 4 + channel % 4;
        reinterpret_cast<int8_t*>(digit0)[at] = static_cast<int8_t>(high);
        reinterpret_cast<int8_t*>(digit1)[at] = static_cast<int8_t>(low);
      }
      queries.sums[0][r] = static_cast<float>(sums[0]);
      queries.sums[1][r] = static_cast<float>(sums[1]);
    }
  }

  // NOLINTNEXTLINE(readability-function-size): windows, tiles, chunks.
  void AttendWindows() {
    const size_t key_dim = params_.key_dim;
    std::vector<float> queries(num_chunks_ * cpu::kChunkRows * key_dim);
    std::copy_n(params_.queries, num_rows_ * key_dim, queries.data());
    size_t num_tokens = 0;
    for (const Bf16Rows& rows : params_.windows) {
      num_tokens += rows.num_tokens;
    }
    size_t position = 0;
    for (const Bf16Rows& rows : params_.windows) {
      for (size_t first = 0; first < rows.num_tokens; first += cpu::kWindowTile) {
        cpu::WindowArgs args{
            .keys = rows.keys + first * key_dim,
            .values = rows.values + first * params_.value_dim,
            .num_tokens = std::min<size_t>(cpu::kWindowTile, rows.num_tokens - first),
            .score_scale = params_.scale * kLog2E,
        };
        for (size_t chunk = 0; chunk < num_chunks_; ++chunk) {
          if (!SetVisible(chunk, num_tokens, position, args)) {
            continue;
          }
          args.queries = queries.data() + chunk * cpu::kChunkRows * key_dim;
          args.outputs = outputs_.data() + chunk * cpu::kChunkRows * params_.value_dim;
          functions_.attend_window(key_dim, params_.value_dim, args, states_[chunk]);
        }
        position += args.num_tokens;
      }
    }
  }

  // How much each row of the chunk sees of the tile at `position`; whether any sees something.
  bool SetVisible(size_t chunk, size_t num_tokens, size_t position, cpu::WindowArgs& args) const {
    bool any = false;
    for (size_t r = 0; r < cpu::kChunkRows; ++r) {
      const size_t row = std::min(chunk * cpu::kChunkRows + r, num_rows_ - 1);
      const size_t visible = num_tokens - (params_.num_queries - 1 - row / params_.group);
      args.visible[r] = visible <= position ? 0 : std::min(visible - position, args.num_tokens);
      any |= args.visible[r] > 0;
    }
    return any;
  }

  void StoreResults() const {
    for (size_t row = 0; row < num_rows_; ++row) {
      const cpu::ChunkState& state = states_[row / cpu::kChunkRows];
      const size_t r = row % cpu::kChunkRows;
      const float* from = outputs_.data() + row * params_.value_dim;
      float* to = params_.out + row * params_.value_dim;
      const float normaliser = 1 / state.sum[r];
      for (size_t channel = 0; channel < params_.value_dim; ++channel) {
        to[channel] = from[channel] * normaliser;
      }
      if (params_.lse != nullptr) {
        params_.lse[row] = (state.max[r] + std::log2(state.sum[r])) * kLn2;
      }
    }
  }

  struct alignas(64) CacheLine {
    int32_t words[16];
  };

  const SplitAttentionParams& params_;
  const cpu::SplitAttentionFunctions& functions_;
  const size_t num_rows_;
  const size_t num_chunks_;
  std::vector<cpu::ChunkState> states_;
  std::vector<float> outputs_;  // [num_chunks * kChunkRows, value_dim], unnormalised.
};

}  // namespace

absl::Status SplitAttention(const SplitAttentionParams& params, CpuPath path) {
  CRUMB_RETURN_IF_ERROR(Check(params));
  if (path == CpuPath::kReference) {
    reference::SplitAttention(params);
  } else {
    FastAttention(params, FunctionsOf(path)).Run();
  }
  return absl::OkStatus();
}

}  // namespace crumb
