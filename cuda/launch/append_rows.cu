// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cuda/kernels/append_rows.cuh"
#include "cuda/launch/append_rows.h"

namespace crumb::gpu {
namespace {

template <int kDim, bool kFp16>
int Launch(const AppendRowsParams& params,
           uint32_t num_multiprocessors,
           bool can_overlap,
           CUstream_st* stream) {
  const auto ceil = [](uint64_t a, uint64_t b) { return (a + b - 1) / b; };
  const uint64_t queries = params.num_query_heads / params.num_kv_heads;
  const bool is_tilted = params.heads.is_tilted;
  const uint64_t tokens = params.num_tokens;
  const uint64_t rows = params.keys.data == nullptr ? 0 : tokens;
  const uint64_t key_tiles = ceil(is_tilted ? rows : tokens * (1 + queries), kAppendRows);
  const uint64_t value_tiles = ceil(rows, kAppendRows);
  const uint64_t query_tiles = is_tilted ? ceil(tokens * queries, kAppendRows) : 0;
  const uint32_t columns = params.num_kv_heads * (kDim / (kAppendWarps * kAppendColumns));
  // At most a block a multiprocessor, since each loads a rotation for itself; then those of the
  // next launch find room beside them.
  const auto num_runs = [&](uint64_t tiles_of_run) {
    return ceil(key_tiles, tiles_of_run) + ceil(value_tiles, tiles_of_run) +
           ceil(query_tiles, tiles_of_run);
  };
  const uint64_t max_runs = std::max<uint64_t>(3, num_multiprocessors / columns);
  uint64_t tiles_of_run = ceil(key_tiles + value_tiles + query_tiles, max_runs);
  while (num_runs(tiles_of_run) > max_runs) {
    ++tiles_of_run;
  }
  const AppendRowsLaunch launch{params, static_cast<uint32_t>(tiles_of_run),
                                static_cast<uint32_t>(ceil(key_tiles, tiles_of_run)),
                                static_cast<uint32_t>(ceil(value_tiles, tiles_of_run))};
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(columns, static_cast<uint32_t>(num_runs(tiles_of_run)));
  config.blockDim = dim3(kAppendThreads);
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = can_overlap ? 1 : 0;
  return cudaLaunchKernelEx(&config, AppendRowsKernel<kDim, kFp16>, launch);
}

template <int kDim>
int LaunchOfType(const AppendRowsParams& params,
                 uint32_t num_multiprocessors,
                 bool can_overlap,
                 CUstream_st* stream) {
  const auto launch = params.type == ElementType::kFp16 ? Launch<kDim, true> : Launch<kDim, false>;
  return launch(params, num_multiprocessors, can_overlap, stream);
}

}  // namespace

int LaunchAppendRows(const AppendRowsParams& params,
                     uint32_t num_multiprocessors,
                     bool can_overlap,
                     CUstream_st* stream) {
  switch (params.heads.head_dim) {
    case 64:
      return LaunchOfType<64>(params, num_multiprocessors, can_overlap, stream);
    case 128:
      return LaunchOfType<128>(params, num_multiprocessors, can_overlap, stream);
    default:
      return LaunchOfType<256>(params, num_multiprocessors, can_overlap, stream);
  }
}

}  // namespace crumb::gpu
