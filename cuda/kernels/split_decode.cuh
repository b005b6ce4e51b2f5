// SPDX-License-Identifier: Apache-2.0
//
// Split decode: attention of one query token a sequence over INT2 history and BF16 windows.
//
// Bound by memory: an INT2 head block of 4,608 bytes (head_dim 128) costs a warp about 450
// instructions for up to four query heads, half of what an H200 can issue while the bytes arrive.
//
// grid = [blocks], a share of the work each (work_share.cuh); every warp has a ring of stages of
// its own and takes every num_warps-th unit of the share. At the end of a pair (sequence, KV head)
// the block merges its warps; rings go on filling meanwhile, also across pairs.
#pragma once

#include <cstdint>

#include "crumb/cuda/decode_params.h"
#include "cuda/kernels/decode_attend.cuh"
#include "cuda/kernels/decode_merge.cuh"
#include "cuda/kernels/decode_queries.cuh"
#include "cuda/kernels/page_ring.cuh"
#include "cuda/kernels/work_share.cuh"
#include "cuda/launch/decode_workspace.h"

namespace crumb::gpu {

// Where things lie in a block's shared memory.
template <int kHeadDim, int kTiles>
struct DecodeShared {
  using Fragments = QueryFragments<kHeadDim, kTiles>;
  using Merge = MergeStorage<kHeadDim, kTiles>;

  int num_warps;
  int num_stages;  // Of a warp's ring.

  static constexpr size_t kStageBytes = StageLayout<kHeadDim>::kBytes;

  constexpr size_t num_slots() const {
    return static_cast<size_t>(num_warps) * static_cast<size_t>(num_stages);
  }
  constexpr size_t fragments() const { return num_slots() * kStageBytes; }
  constexpr size_t merge() const { return fragments() + sizeof(Fragments); }
  constexpr size_t states() const { return merge() + Merge::Bytes(num_warps); }
  constexpr size_t share() const { return states() + num_slots() * sizeof(StageState); }
  constexpr size_t is_last() const { return share() + sizeof(WorkShareStorage); }
  constexpr size_t bytes() const { return is_last() + 16; }
};

// Fills a warp's ring with its units of the block's share, in order. The warp's lanes look up 32
// units at a time, so that their loads of the page tables are on their way together.
template <int kHeadDim>
class Producer {
 public:
  __device__ __forceinline__
  Producer(const DecodeLaunch& launch, const WorkShare& share, int warp, int num_warps, int lane)
      : launch_(launch), cursor_(share.start), unit_(warp), num_warps_(num_warps), lane_(lane) {
    size_ = share.size;
    LookUp();
  }

  // The first units, at most one a stage. Windows may be written by the work before this launch,
  // history may not: units of history are not held up by it.
  __device__ __forceinline__ void FillRing(WarpRing<kHeadDim>& ring, int num_stages) {
    for (int i = 0; i < num_stages && unit_ < size_; ++i) {
      const Fill fill = Take();
      if (fill.rows != kRowsOfInt2) {
        WaitForEarlierWork();
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
  // Lane i looks up the i-th of the warp's next 32 units.
  __device__ __forceinline__ void LookUp() {
    const int unit = unit_ + lane_ * num_warps_;
    found_ = {};
    if (unit < size_) {
      found_ = cursor_.Locate(launch_, unit);
      if (found_.source == nullptr) {
        ReportNullPage();
      }
    }
    taken_ = 0;
  }
  __device__ __forceinline__ void ReportNullPage() const {
    auto* findings = static_cast<DecodeFindings*>(launch_.params.workspace);
    atomicOr(&findings->problems, found_.rows == kRowsOfInt2 ? kNullHistoryPage : kNullWindowPage);
    atomicMax(&findings->sequence, cursor_.sequence);
  }
  __device__ __forceinline__ Fill Take() {
    if (taken_ == 32) {
      LookUp();
    }
    Fill fill;
    fill.source = reinterpret_cast<const std::byte*>(
        __shfl_sync(kFullWarp, reinterpret_cast<unsigned long long>(found_.source), taken_));
    fill.rows = __shfl_sync(kFullWarp, found_.rows, taken_);
    ++taken_;
    unit_ += num_warps_;
    return fill;
  }

  const DecodeLaunch& launch_;
  PairCursor cursor_;  // Of this lane.
  Fill found_;         // Of this lane.
  int size_;
  int unit_;  // The next to be pushed.
  int taken_ = 0;
  int num_warps_;
  int lane_;
};

// Sequences without a token have no unit of work and so no block: outputs of 0 for them, and a look
// at lengths that tables cannot hold.
__device__ inline void FinishOddSequences(const SplitDecodeParams& params,
                                          DecodeFindings* findings) {
  const uint32_t stride = gridDim.x * blockDim.x;
  for (uint32_t sequence = blockIdx.x * blockDim.x + threadIdx.x; sequence < params.num_sequences;
       sequence += stride) {
    if (LengthOf(params, sequence).units() == 0) {
      for (uint32_t head = 0; head < params.num_query_heads; ++head) {
        const size_t row = size_t{sequence} * params.num_query_heads + head;
        for (uint32_t channel = 0; channel < params.head_dim; channel += 4) {
          StoreResult(params, row, static_cast<int>(channel), make_float4(0, 0, 0, 0), -INFINITY,
                      0);
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
      atomicOr(&findings->problems, problems);
      atomicMax(&findings->sequence, sequence);
    }
  }
}

// Whether this block is the last to bring its part of a pair that blocks first..last share; if so,
// it sees the others' parts. By all threads. The barriers make one thread's release and acquire
// count for all of the block.
__device__ __forceinline__ bool ComesLast(uint32_t* arrivals,
                                          uint32_t first,
                                          uint32_t last,
                                          int* is_last) {
  __syncthreads();
  if (threadIdx.x == 0) {
    const bool all_here = AddAcquireRelease(&arrivals[first], 1) == last - first;
    if (all_here) {
      arrivals[first] = 0;  // Ready for the next launch.
    }
    *is_last = all_here;
  }
  __syncthreads();
  return *is_last != 0;
}

template <int kHeadDim, int kTiles>
constexpr int kMaxThreads = kHeadDim* kTiles <= 128 ? kMaxWarps * 32 : kMaxWarps * 16;

template <int kHeadDim, int kTiles>
__global__ void __launch_bounds__(kMaxThreads<kHeadDim, kTiles>, 1)
    SplitDecodeKernel(const __grid_constant__ DecodeLaunch launch) {
  extern __shared__ __align__(128) std::byte shared[];
  using Shared = DecodeShared<kHeadDim, kTiles>;
  const int num_warps = static_cast<int>(blockDim.x / 32);
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const SplitDecodeParams& params = launch.params;
  const int num_stages = launch.num_stages;
  const Shared layout{num_warps, num_stages};
  const DecodeWorkspace workspace{static_cast<std::byte*>(params.workspace), gridDim.x,
                                  launch.heads_of_pass, kHeadDim};

  // 1. This block's share of the work. Queries are asked for before pages where they may be: they
  // would queue behind a ring's worth of every multiprocessor.
  const auto slot = static_cast<size_t>(warp * num_stages);
  WarpRing<kHeadDim> ring(shared + slot * Shared::kStageBytes,
                          reinterpret_cast<StageState*>(shared + layout.states()) + slot,
                          num_stages, lane);
  const WorkShare share =
      FindWorkShare(launch, *reinterpret_cast<WorkShareStorage*>(shared + layout.share()));
  Producer<kHeadDim> producer(launch, share, warp, num_warps, lane);
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
  producer.FillRing(ring, num_stages);

  // 2. From here on, what earlier work wrote may be read.
  WaitForEarlierWork();
  LetNextLaunchStart();
  if (params.history_is_settled) {
    load_query(warp);
  }

  // 3. Pair by pair.
  auto& fragments = *reinterpret_cast<typename Shared::Fragments*>(shared + layout.fragments());
  const typename Shared::Merge merge(shared + layout.merge(), num_warps);
  auto* is_last = reinterpret_cast<int*>(shared + layout.is_last());
  WarpAttention<kHeadDim, kTiles> attention(lane);
  const float score_scale = params.scale * 1.4426950408889634f;
  int unit = warp;
  while (pair.first < share.size) {
    uint32_t group;
    const size_t query_row = pair.QueryRow(launch, &group);
    for (int head = warp; head < kTiles * kHeadsOfTile; head += num_warps) {
      if (head != warp) {
        load_query(head);
      }
      PrepareQuery<kHeadDim, kTiles>(params, query, head, lane, fragments);
    }
    // Which blocks have parts of this pair; divisions, and time for them while pages arrive.
    const bool begins_here = pair.first >= 0;
    const bool is_whole = begins_here && pair.end() <= share.size;
    uint32_t first_block = 0;
    uint32_t last_block = 0;
    if (!is_whole) {
      first_block = share.OwnerOf(share.begin + static_cast<uint64_t>(int64_t{pair.first}));
      last_block = share.OwnerOf(share.begin + static_cast<uint64_t>(int64_t{pair.end()}) - 1);
    }
    __syncthreads();
    attention.Start(fragments);
    const int end = min(pair.end(), share.size);
    for (; unit < end; unit += num_warps) {
      int rows;
      const std::byte* stage = ring.Front(&rows);
      if (rows == kRowsOfInt2) {
        attention.AttendPage(stage);
      } else if (rows != kRowsOfNothing) {
        attention.AttendTile(const_cast<std::byte*>(stage), rows, fragments, score_scale);
      }
      ring.Pop();
      producer.Refill(ring);
    }

    // 4. The pair's part of this block, and all of it if this block is the last to have a part.
    StoreState(attention.state(), warp, num_warps, lane, merge);
    MergeWarps<kHeadDim, kTiles>(params, merge, num_warps, static_cast<int>(group), query_row,
                                 is_whole, workspace,
                                 workspace.place(blockIdx.x, begins_here ? 1 : 0));
    if (!is_whole && ComesLast(ArrivalsOf(workspace), first_block, last_block, is_last)) {
      MergeBlocks<kHeadDim, kTiles>(params, merge, num_warps, workspace, first_block, last_block,
                                    static_cast<int>(group), query_row);
    }
    __syncthreads();
    pair.Next(launch);
    load_query(warp);
  }
  FinishOddSequences(params, FindingsOf(workspace));
}

}  // namespace crumb::gpu
