// SPDX-License-Identifier: Apache-2.0
//
// Split decode: attention of one query token a sequence over INT2 history and BF16 windows.
//
// Bound by memory: an INT2 head block of 4,608 bytes (head_dim 128) costs a warp about 450
// instructions for up to four query heads, half of what an H200 can issue while the bytes arrive.
//
// grid = [blocks], a share of the work each, or, kTeams, [blocks of a team, pairs]
// (work_share.cuh): a form of its own, as short as it can be, since of one sequence every
// instruction runs once and waits for its way from memory. Every warp has a ring of stages of its
// own and takes every num_warps-th unit of its block. At the end of a pair (sequence, KV head) the
// block merges its warps; rings go on filling meanwhile, also across pairs. At its end a block
// merges the pair that others left to it, of which it has the last part.
#pragma once

#include <cstdint>

#include "crumb/cuda/decode_params.h"
#include "cuda/kernels/decode_attend.cuh"
#include "cuda/kernels/decode_merge.cuh"
#include "cuda/kernels/decode_parts.cuh"
#include "cuda/kernels/decode_queries.cuh"
#include "cuda/kernels/page_ring.cuh"
#include "cuda/kernels/work_share.cuh"
#include "cuda/launch/decode_workspace.h"
#include "cuda/launch/split_decode.h"

namespace crumb::gpu {

// Where things lie in a block's shared memory.
template <int kHeadDim, int kTiles>
struct DecodeShared {
  using Fragments = QueryFragments<kHeadDim, kTiles>;
  using Merge = MergeStorage<kHeadDim, kTiles>;
  using Own = OwnPart<kHeadDim, kTiles>;

  int num_warps;
  int num_stages;  // Of a warp's ring.

  static constexpr size_t kStageBytes = StageLayout<kHeadDim>::kBytes;

  constexpr size_t num_slots() const {
    return static_cast<size_t>(num_warps) * static_cast<size_t>(num_stages);
  }
  constexpr size_t fragments() const { return num_slots() * kStageBytes; }
  constexpr size_t merge() const { return fragments() + sizeof(Fragments); }
  constexpr size_t states() const { return merge() + Merge::Bytes(num_warps); }
  constexpr size_t own() const { return states() + num_slots() * sizeof(StageState); }
  constexpr size_t share() const { return own() + sizeof(Own); }
  constexpr size_t bytes() const { return share() + sizeof(WorkShareStorage); }
};

// Fills a warp's ring with its units of the share, in order. The warp's lanes look up 32
// units at a time, so that their loads of the page tables are on their way together.
template <int kHeadDim, bool kTeams>
class Producer {
 public:
  __device__ __forceinline__ Producer(const DecodeLaunch& launch, int first, int step, int lane)
      : launch_(launch), unit_(first), step_(step), lane_(lane) {}

  // Asks for what can be looked up before the share is known.
  __device__ __forceinline__ void LookUpEarly() {
    if constexpr (kTeams) {
      const DevicePageTable& table = launch_.params.history;
      const auto unit = static_cast<uint32_t>(unit_ + lane_ * step_);
      if (unit < table.stride) {
        const auto* entries = reinterpret_cast<const unsigned long long*>(table.pages);
        early_ = reinterpret_cast<const std::byte*>(__ldg(&entries[unit]));
      }
    }
  }
  __device__ __forceinline__ void Start(const WorkShare& share) {
    cursor_ = share.start;
    size_ = share.size;
    LookUp(&early_);
  }

  // The first units, one a stage that is given. Windows may be written by the work before this
  // launch, history may not: units of history are not held up by it.
  __device__ __forceinline__ void FillRing(WarpRing<kHeadDim>& ring, int num_stages) {
    for (int i = 0; i < num_stages && unit_ < size_; ++i) {
      const Fill fill = TakeFound();  // At most 32 stages: all have been looked up.
      if (fill.rows != kRowsOfInt2) [[unlikely]] {
        launch_.WaitForInputs();
      }
      ring.Push(fill);
    }
  }

  // One unit more, if there is one.
  __device__ __forceinline__ void Refill(WarpRing<kHeadDim>& ring) {
    if (unit_ < size_) {
      ring.Push(Take());
    }
  }

 private:
  // Lane i looks up the i-th of the warp's next 32 units; `early`: what LookUpEarly found of it.
  __device__ __forceinline__ void LookUp(const std::byte* const* early = nullptr) {
    const int unit = unit_ + lane_ * step_;
    found_ = {};
    if (unit < size_) {
      if constexpr (kTeams) {
        found_ = cursor_.LocateHere(launch_, unit, early);
      } else {
        found_ = cursor_.Locate(launch_, unit);
      }
      if (found_.source == nullptr) [[unlikely]] {
        ReportNullPage();
      }
    }
    taken_ = 0;
  }
  __device__ __forceinline__ void ReportNullPage() const {
    DecodeFindings* findings = FindingsOf(launch_.params);
    atomicOr(&findings->problems, found_.rows == kRowsOfInt2 ? kNullHistoryPage : kNullWindowPage);
    atomicMax(&findings->sequence, cursor_.sequence);
  }
  __device__ __forceinline__ Fill Take() {
    if (taken_ == 32) [[unlikely]] {
      LookUp();
    }
    return TakeFound();
  }
  __device__ __forceinline__ Fill TakeFound() {
    Fill fill;
    fill.source = reinterpret_cast<const std::byte*>(
        __shfl_sync(kFullWarp, reinterpret_cast<unsigned long long>(found_.source), taken_));
    fill.rows = __shfl_sync(kFullWarp, found_.rows, taken_);
    ++taken_;
    unit_ += step_;
    return fill;
  }

  const DecodeLaunch& launch_;
  PairCursor cursor_;  // Of this lane.
  Fill found_;         // Of this lane.
  const std::byte* early_ = nullptr;
  int size_ = 0;
  int unit_;  // The next to be pushed.
  int taken_ = 0;
  int step_;  // To the warp's next one.
  int lane_;
};

// Sequences without a token have no unit of work and so no block: outputs of 0 for them, and a look
// at lengths that tables cannot hold.
__device__ __noinline__ inline void FinishOddSequences(const SplitDecodeParams& params) {
  const uint32_t stride = gridDim.x * gridDim.y * blockDim.x;
  const uint32_t block = blockIdx.y * gridDim.x + blockIdx.x;
  for (uint32_t sequence = block * blockDim.x + threadIdx.x; sequence < params.num_sequences;
       sequence += stride) {
    if (LengthOf(params, sequence).units() == 0) {
      for (uint32_t head = 0; head < params.num_query_heads; ++head) {
        const size_t row = size_t{sequence} * params.num_query_heads + head;
        for (uint32_t channel = 0; channel < params.head_dim; channel += 4) {
          StoreResult(params, row, channel, make_float4(0, 0, 0, 0), -INFINITY, 0);
        }
      }
    }
    uint32_t problems = 0;
    if (params.history.stride > 0 && params.history_pages[sequence] > params.history.stride) {
      problems |= kHistoryBeyondTable;
    }
    if (params.windows.stride > 0 &&
        params.window_tokens[sequence] > params.windows.stride * kPageTokens) {
      problems |= kWindowBeyondTable;
    }
    if (problems != 0) {
      atomicOr(&FindingsOf(params)->problems, problems);
      atomicMax(&FindingsOf(params)->sequence, sequence);
    }
  }
}

// The blocks that have a part of a pair: of its team, those that have a unit; else by the cut.
template <bool kTeams>
__device__ __forceinline__ void FindBlocks(const DecodeLaunch& launch,
                                           const WorkShare& share,
                                           const PairCursor& pair,
                                           PairTarget& target) {
  const uint32_t block = launch.block();
  target.first_block = block;
  target.last_block = block;
  if constexpr (kTeams) {
    target.first_block = block - blockIdx.x;
    target.last_block = target.first_block + min(gridDim.x, static_cast<uint32_t>(share.size)) - 1;
  } else if (pair.first < 0 || pair.end() > share.size) {
    target.first_block = share.OwnerOf(share.begin + static_cast<uint64_t>(int64_t{pair.first}));
    target.last_block = share.OwnerOf(share.begin + static_cast<uint64_t>(int64_t{pair.end()}) - 1);
  }
}

template <int kHeadDim, int kTiles, bool kTeams = false>
constexpr int kMaxThreads = (kHeadDim * kTiles > 128 ? kMaxWarps / 2
                             : kTeams                ? kMaxWarpsOfTeam
                                                     : kMaxWarps) *
                            32;

template <int kHeadDim, int kTiles, bool kTeams>
__global__ void __launch_bounds__(kMaxThreads<kHeadDim, kTiles, kTeams>, 1)
    SplitDecodeKernel(const __grid_constant__ DecodeLaunch launch) {
  extern __shared__ __align__(128) std::byte shared[];
  using Shared = DecodeShared<kHeadDim, kTiles>;
  const int num_warps = static_cast<int>(blockDim.x / 32);
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const SplitDecodeParams& params = launch.params;
  const int num_stages = launch.num_stages;
  const Shared layout{num_warps, num_stages};

  // 1. This block's share of the work. Queries are asked for before pages where they may be: they
  // would queue behind a ring's worth of every multiprocessor.
  const int ranks = kTeams ? static_cast<int>(gridDim.x) : 1;
  const int step = num_warps * ranks;
  int unit = warp * ranks + (kTeams ? static_cast<int>(blockIdx.x) : 0);
  Producer<kHeadDim, kTeams> producer(launch, unit, step, lane);
  producer.LookUpEarly();
  const RawLength first_length = kTeams ? RawLength::Load(params, 0) : RawLength{};
  const auto slot = static_cast<size_t>(warp * num_stages);
  WarpRing<kHeadDim> ring(shared + slot * Shared::kStageBytes,
                          reinterpret_cast<StageState*>(shared + layout.states()) + slot,
                          num_stages, lane);
  const WorkShare share = FindWorkShare<kTeams>(
      launch, first_length, *reinterpret_cast<WorkShareStorage*>(shared + layout.share()));
  producer.Start(share);
  PairCursor pair = share.start;
  RawQuery<kHeadDim> query;
  const auto load_query = [&](int head) {
    uint32_t group;
    const size_t row = pair.QueryRow(launch, &group);
    query.Load(params.queries, row + static_cast<size_t>(head),
               pair.first < share.size && head < static_cast<int>(group), lane);
  };
  if (!params.history_is_settled) {
    load_query(warp);
  }
  // While the work before this launch still runs, half of the ring: what is asked for stands in
  // the way of that work's last loads and of the queries.
  const int num_early = params.history_is_settled ? (num_stages + 1) / 2 : num_stages;
  producer.FillRing(ring, num_early);

  // 2. From here on, what earlier work wrote may be read.
  launch.WaitForInputs();
  LetNextLaunchStart();
  if (params.history_is_settled) {
    load_query(warp);
    producer.FillRing(ring, num_stages - num_early);
  }
  if (share.is_odd) [[unlikely]] {
    FinishOddSequences(params);
  }

  // 3. Pair by pair.
  auto& fragments = *reinterpret_cast<typename Shared::Fragments*>(shared + layout.fragments());
  const typename Shared::Merge merge(shared + layout.merge(), num_warps);
  auto& own = *reinterpret_cast<typename Shared::Own*>(shared + layout.own());
  WarpAttention<kHeadDim, kTiles> attention(lane);
  const float score_scale = params.scale * 1.4426950408889634f;
  PairTarget left;  // To be merged at the end.
  while (pair.first < share.size) {
    uint32_t group;
    PairTarget target;
    target.query_row = pair.QueryRow(launch, &group);
    target.group = group;
    for (int head = warp; head < kTiles * kHeadsOfTile; head += num_warps) {
      if (head != warp) {
        load_query(head);
      }
      PrepareQuery<kHeadDim, kTiles>(params, query, head, lane, fragments);
    }
    FindBlocks<kTeams>(launch, share, pair,
                       target);  // Divisions, and time for them while pages arrive.
    __syncthreads();
    attention.Start(fragments);
    const int end = min(pair.end(), share.size);
    for (; unit < end; unit += step) {
      int rows;
      const std::byte* stage = ring.Front(&rows);
      if (rows == kRowsOfInt2) [[likely]] {
        attention.AttendPage(stage);
      } else if (rows != kRowsOfNothing) {
        attention.AttendTile(const_cast<std::byte*>(stage), rows, fragments, score_scale);
      }
      ring.Pop();
      producer.Refill(ring);
    }

    // 4. The pair's part of this block.
    StoreState(attention.state(), warp, lane, merge);
    MergeWarps(launch, merge, static_cast<uint32_t>(num_warps), target, own);
    if (!target.is_whole() && target.last_block == launch.block()) {
      left = target;
    }
    if constexpr (kTeams) {
      break;
    }
    __syncthreads();
    pair.Next(launch);
    load_query(warp);
  }

  // 5. What others left to this block.
  if (!left.is_whole()) {
    MergeBlocks(launch, merge, static_cast<uint32_t>(num_warps), left, own);
  }
  if (launch.is_beside && launch.block() + 1 == launch.num_blocks()) {
    WaitForEarlierWork();  // So that what comes after this launch comes after that too.
  }
}

}  // namespace crumb::gpu
