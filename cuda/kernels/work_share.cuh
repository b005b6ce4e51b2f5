// SPDX-License-Identifier: Apache-2.0
//
// Which part of the batch a block works on. All units of work (an INT2 head block, or a tile of
// eight BF16 rows: about as many bytes) stand in one line, ordered by sequence, KV head, and within
// such a pair history first, then windows. Block b of C has units [total * b / C, total * (b+1) /
// C). So every block reads about as many bytes, however ragged the batch, and who works on what
// follows from the lengths alone.
//
// Of one sequence, every pair has the same number of units, and a team of blocks takes turns with
// them: then which pages are a block's does not depend on the length, and they are looked up while
// it is still on its way.
#pragma once

#include <cstdint>

#include "crumb/cuda/decode_params.h"
#include "cuda/kernels/page_ring.cuh"
#include "cuda/launch/decode_workspace.h"
#include "proto/page/page_format.h"

namespace crumb::gpu {

inline constexpr int kMaxWarps = 16;
// A block is not worth starting for less.
inline constexpr uint64_t kLeastUnitsOfBlock = 4;
inline constexpr int kTilesOfPage = kPageTokens / kTileRows;

struct SequenceLength {
  uint32_t pages = 0;   // INT2.
  uint32_t tokens = 0;  // Of the windows.
  bool is_cut = false;  // The lengths say more than their tables can hold.

  __device__ __forceinline__ int units() const {
    return static_cast<int>(pages + (tokens + kTileRows - 1) / kTileRows);
  }
};

// A sequence's length as the caller's arrays have it.
struct RawLength {
  uint32_t pages = 0;
  uint32_t tokens = 0;

  // Starts to load it.
  __device__ __forceinline__ static RawLength Load(const SplitDecodeParams& params,
                                                   uint32_t sequence) {
    RawLength raw;
    if (params.history.stride > 0) {
      raw.pages = __ldg(&params.history_pages[sequence]);
    }
    if (params.windows.stride > 0) {
      raw.tokens = __ldg(&params.window_tokens[sequence]);
    }
    return raw;
  }
  // Never beyond the tables, whatever the arrays say.
  __device__ __forceinline__ SequenceLength Cut(const SplitDecodeParams& params) const {
    const uint32_t most_tokens = params.windows.stride * kPageTokens;
    return {min(pages, params.history.stride), min(tokens, most_tokens),
            pages > params.history.stride || tokens > most_tokens};
  }
};

__device__ __forceinline__ SequenceLength LengthOf(const SplitDecodeParams& params,
                                                   uint32_t sequence) {
  return RawLength::Load(params, sequence).Cut(params);
}

// Empty, or longer than its tables say it can be.
__device__ __forceinline__ bool IsOdd(const SequenceLength& length) {
  return length.is_cut || length.units() == 0;
}

// A launch. Where a KV head has more query heads than a kernel takes at once, it is read in several
// passes: each counts as a head of its own, of the next kHeadsOfPass query heads.
struct DecodeLaunch {
  SplitDecodeParams params;
  int num_stages = 0;  // Of a warp's ring.
  uint32_t passes = 1;
  uint32_t heads_of_pass = 0;
  uint32_t heads_of_group = 0;  // Query heads of a KV head.
  // In the workspace: see decode_workspace.h.
  float* part_sums = nullptr;
  float* part_outputs = nullptr;
  bool is_beside = false;  // See DecodeGrid.

  // Until what earlier work wrote may be read.
  __device__ __forceinline__ void WaitForInputs() const {
    if (!is_beside) {
      WaitForEarlierWork();
    }
  }
  __device__ __forceinline__ uint32_t num_heads() const { return params.num_kv_heads * passes; }
  __device__ __forceinline__ uint32_t num_blocks() const { return gridDim.x * gridDim.y; }
  __device__ __forceinline__ uint32_t block() const { return blockIdx.y * gridDim.x + blockIdx.x; }
};

// A pair (sequence, KV head) and where its units lie, counted from the block's first unit.
struct PairCursor {
  uint32_t sequence = 0;
  uint32_t head = 0;  // KV head.
  uint32_t pass = 0;
  int first = 0;  // Of the pair's units; negative if an earlier block began the pair.
  SequenceLength length;

  __device__ __forceinline__ int end() const { return first + length.units(); }

  __device__ __forceinline__ void Next(const DecodeLaunch& launch) {
    first = end();
    if (++pass < launch.passes) {
      return;
    }
    pass = 0;
    const SplitDecodeParams& params = launch.params;
    if (++head < params.num_kv_heads) {
      return;
    }
    head = 0;
    do {
      ++sequence;
      length = sequence < params.num_sequences ? LengthOf(params, sequence) : SequenceLength{};
    } while (length.units() == 0 && sequence < params.num_sequences);
  }

  // The pair's query heads: `*group` rows of queries and outputs from the returned one on.
  __device__ __forceinline__ size_t QueryRow(const DecodeLaunch& launch, uint32_t* group) const {
    const SplitDecodeParams& params = launch.params;
    const uint32_t before = pass * launch.heads_of_pass;
    *group = min(launch.heads_of_group - before, launch.heads_of_pass);
    return size_t{sequence} * params.num_query_heads + head * launch.heads_of_group + before;
  }

  // Where unit `unit` comes from, moving on to its pair. Units must be asked for in order.
  __device__ __forceinline__ Fill Locate(const DecodeLaunch& launch, int unit) {
    while (unit >= end()) {
      Next(launch);
    }
    return LocateHere(launch, unit);
  }
  // The same of a unit of this pair. `early`, if not null, is the entry of the history's table for
  // it.
  __device__ __forceinline__ Fill LocateHere(const DecodeLaunch& launch,
                                             int unit,
                                             const std::byte* const* early = nullptr) const {
    const SplitDecodeParams& params = launch.params;
    const auto in_pair = static_cast<uint32_t>(unit - first);
    const bool is_history = in_pair < length.pages;
    const DevicePageTable& table = is_history ? params.history : params.windows;
    const uint32_t tile = in_pair - length.pages;
    const std::byte* page = is_history && early != nullptr
                                ? *early
                                : PageOf(table, is_history ? in_pair : tile / kTilesOfPage);
    uint64_t offset = table.block_offset + head * table.head_stride;
    if (is_history) {
      return {page == nullptr ? nullptr : page + offset, kRowsOfInt2};
    }
    offset += tile % kTilesOfPage * (kTileRows * 2) * params.head_dim;
    return {page == nullptr ? nullptr : page + offset,
            static_cast<int>(min(length.tokens - tile * kTileRows, uint32_t{kTileRows}))};
  }

 private:
  __device__ __forceinline__ const std::byte* PageOf(const DevicePageTable& table,
                                                     uint32_t page) const {
    const auto* entries = reinterpret_cast<const unsigned long long*>(table.pages);
    return reinterpret_cast<const std::byte*>(
        __ldg(&entries[size_t{sequence} * table.stride + page]));
  }
};

struct WorkShare {
  uint64_t total = 0;   // Units of the batch.
  uint64_t begin = 0;   // This block's first.
  uint32_t blocks = 0;  // That have a share; those from here on have none.
  int size = 0;         // Units of this block.
  bool is_odd =
      false;         // A sequence is empty, or its length beyond a table; the same in all blocks.
  PairCursor start;  // The pair of its first unit.

  // The block that has this unit.
  __device__ __forceinline__ uint32_t OwnerOf(uint64_t unit) const {
    return static_cast<uint32_t>(Divide((unit + 1) * blocks - 1, total));
  }

  // Of the block's own share, once `total` is known.
  __device__ __forceinline__ void Cut() {
    const uint64_t wanted = (total + kLeastUnitsOfBlock - 1) / kLeastUnitsOfBlock;
    blocks = wanted < gridDim.x ? static_cast<uint32_t>(wanted) : gridDim.x;
    if (blockIdx.x < blocks) {
      begin = Divide(total * blockIdx.x, blocks);
      size = static_cast<int>(Divide(total * (blockIdx.x + 1), blocks) - begin);
    }
  }
  // `length` is that of the sequence that `begin` lies in, `before` the units of those before it.
  __device__ __forceinline__ void SetStart(const DecodeLaunch& launch,
                                           uint32_t sequence,
                                           uint64_t before,
                                           SequenceLength length) {
    const auto in_sequence = static_cast<uint32_t>(begin - before);
    const auto units = static_cast<uint32_t>(length.units());
    const uint32_t head = in_sequence / units;
    start.sequence = sequence;
    start.head = launch.passes == 1 ? head : head / launch.passes;
    start.pass = head - start.head * launch.passes;
    start.first = -static_cast<int>(in_sequence - head * units);
    start.length = length;
  }

 private:
  // 64-bit division is a hundred instructions, and blocks start with it.
  static __device__ __forceinline__ uint64_t Divide(uint64_t a, uint64_t b) {
    if (((a | b) >> 32) == 0) {
      return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
    }
    return a / b;
  }
};

struct WorkShareStorage {
  uint64_t warp_sums[kMaxWarps];
  WorkShare share;
};

// The sum over the lanes up to and with this one.
__device__ __forceinline__ uint64_t SumOfLanes(uint64_t value, uint32_t lane) {
#pragma unroll
  for (uint32_t step = 1; step < 32; step *= 2) {
    const uint64_t other = __shfl_up_sync(kFullWarp, value, step);
    value += lane >= step ? other : 0;
  }
  return value;
}

// For at most 32 sequences: every warp by itself, which takes no barrier.
__device__ __forceinline__ WorkShare FindWorkShareOfFew(const DecodeLaunch& launch) {
  const uint32_t lane = threadIdx.x % 32;
  SequenceLength length;
  bool is_odd = false;
  if (lane < launch.params.num_sequences) {
    length = LengthOf(launch.params, lane);
    is_odd = IsOdd(length);
  }
  const uint64_t mine = static_cast<uint64_t>(length.units()) * launch.num_heads();
  const uint64_t until = SumOfLanes(mine, lane);
  WorkShare share;
  share.is_odd = __any_sync(kFullWarp, is_odd) != 0;
  share.total = __shfl_sync(kFullWarp, until, 31);
  share.Cut();
  const unsigned here =
      __ballot_sync(kFullWarp, share.begin >= until - mine && share.begin < until);
  if (share.size > 0) {
    const int owner = __ffs(static_cast<int>(here)) - 1;
    length.pages = __shfl_sync(kFullWarp, length.pages, owner);
    length.tokens = __shfl_sync(kFullWarp, length.tokens, owner);
    const uint64_t before = __shfl_sync(kFullWarp, until - mine, owner);
    share.SetStart(launch, static_cast<uint32_t>(owner), before, length);
  }
  return share;
}

// By all threads of the block, at most kMaxWarps * 32; each counts a run of sequences.
__device__ inline WorkShare FindWorkShareOfMany(const DecodeLaunch& launch,
                                                WorkShareStorage& storage) {
  const SplitDecodeParams& params = launch.params;
  const uint32_t num_threads = blockDim.x;
  const uint32_t warp = threadIdx.x / 32;
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t per_thread = (params.num_sequences + num_threads - 1) / num_threads;
  const uint32_t first = min(threadIdx.x * per_thread, params.num_sequences);
  const uint32_t last = min(first + per_thread, params.num_sequences);
  uint64_t mine = 0;
  bool is_odd = false;
  for (uint32_t sequence = first; sequence < last; ++sequence) {
    const SequenceLength length = LengthOf(params, sequence);
    is_odd = is_odd || IsOdd(length);
    mine += static_cast<uint64_t>(length.units()) * launch.num_heads();
  }
  uint64_t until = SumOfLanes(mine, lane);
  if (lane == 31) {
    storage.warp_sums[warp] = until;
  }
  WorkShare share;
  share.is_odd = __syncthreads_or(is_odd) != 0;
  for (uint32_t i = 0; i < num_threads / 32; ++i) {
    until += i < warp ? storage.warp_sums[i] : 0;
    share.total += storage.warp_sums[i];
  }
  share.Cut();
  if (share.size == 0) {
    return share;
  }
  if (share.begin >= until - mine && share.begin < until) {
    uint64_t before = until - mine;
    uint32_t sequence = first;
    SequenceLength length = LengthOf(params, sequence);
    uint64_t units = static_cast<uint64_t>(length.units()) * launch.num_heads();
    while (share.begin >= before + units) {
      before += units;
      length = LengthOf(params, ++sequence);
      units = static_cast<uint64_t>(length.units()) * launch.num_heads();
    }
    share.SetStart(launch, sequence, before, length);
    storage.share = share;
  }
  __syncthreads();
  return storage.share;
}

// All of a pair, with whose units the team takes turns.
__device__ __forceinline__ WorkShare FindWorkShareOfTeam(const DecodeLaunch& launch,
                                                         const RawLength& length) {
  WorkShare share;
  share.start.head = launch.passes == 1 ? blockIdx.y : blockIdx.y / launch.passes;
  share.start.pass = blockIdx.y - share.start.head * launch.passes;
  share.start.length = length.Cut(launch.params);
  const int units = share.start.length.units();
  share.is_odd = IsOdd(share.start.length);
  share.size = static_cast<int>(blockIdx.x) < units ? units : 0;
  return share;
}

// kTeams: grid = [team, pairs], and blocks of a team take turns with a pair's units; else [blocks].
// `first` is the length of the first sequence.
template <bool kTeams>
__device__ __forceinline__ WorkShare FindWorkShare(const DecodeLaunch& launch,
                                                   const RawLength& first,
                                                   WorkShareStorage& storage) {
  if constexpr (kTeams) {
    return FindWorkShareOfTeam(launch, first);
  } else {
    return launch.params.num_sequences <= 32 ? FindWorkShareOfFew(launch)
                                             : FindWorkShareOfMany(launch, storage);
  }
}

}  // namespace crumb::gpu
