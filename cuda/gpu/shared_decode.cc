// SPDX-License-Identifier: Apache-2.0
#include "crumb/cuda/shared_decode.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

#include "crumb/cuda/split_decode.h"
#include "cuda/gpu/check_params.h"
#include "cuda/gpu/cuda_status.h"
#include "cuda/gpu/decode_grid.h"
#include "cuda/gpu/launch_gpu.h"
#include "cuda/launch/shared_prefix.h"
#include "proto/base/status_macros.h"

namespace crumb {
namespace {

// Blocks that share a prefix's pages: as many as give every multiprocessor one block.
uint32_t SplitsOf(const SharedDecodeParams& params, const GpuDevice& device) {
  const SplitDecodeParams& batch = params.batch;
  const uint32_t rows = batch.num_sequences * (batch.num_query_heads / batch.num_kv_heads);
  const uint32_t others =
      batch.num_kv_heads * ((rows + gpu::kPrefixBlockRows - 1) / gpu::kPrefixBlockRows);
  return std::clamp<uint32_t>(device.num_multiprocessors / others, 1, params.prefix.stride);
}

// Split decode's workspace comes first, then what the launches hand to one another.
struct Workspace {
  size_t own_outputs = 0;
  size_t own_lse = 0;
  size_t sums = 0;
  size_t outputs = 0;
  size_t bytes = 0;
};

Workspace Arrange(const SharedDecodeParams& params, uint32_t num_splits, size_t split_decode) {
  const size_t rows = size_t{params.batch.num_sequences} * params.batch.num_query_heads;
  const uint32_t rows_of_head =
      params.batch.num_sequences * (params.batch.num_query_heads / params.batch.num_kv_heads);
  const size_t num_parts =
      size_t{num_splits} *
      gpu::PrefixPartsOfSplit(params.batch.head_dim, rows_of_head, rows_of_head - 1);
  const auto round_up = [](size_t bytes) { return (bytes + 255) / 256 * 256; };
  Workspace workspace;
  workspace.own_outputs = round_up(split_decode);
  workspace.own_lse =
      workspace.own_outputs + round_up(rows * params.batch.head_dim * sizeof(float));
  workspace.sums = workspace.own_lse + round_up(rows * sizeof(float));
  workspace.outputs = workspace.sums + round_up(rows * num_parts * 2 * sizeof(float));
  workspace.bytes =
      workspace.outputs + round_up(rows * num_parts * params.batch.head_dim * sizeof(float));
  return workspace;
}

}  // namespace

absl::StatusOr<size_t> SharedDecodeWorkspaceBytes(const SharedDecodeParams& params) {
  CRUMB_RETURN_IF_ERROR(gpu::CheckSharedShape(params));
  CRUMB_ASSIGN_OR_RETURN(const GpuDevice device, CurrentGpu());
  CRUMB_ASSIGN_OR_RETURN(const size_t split_decode, SplitDecodeWorkspaceBytes(params.batch));
  return Arrange(params, SplitsOf(params, device), split_decode).bytes;
}

absl::Status SharedDecode(const SharedDecodeParams& params, GpuStream stream) {
  CRUMB_RETURN_IF_ERROR(ValidateSharedDecode(params));
  CRUMB_ASSIGN_OR_RETURN(const GpuDevice device, gpu::LaunchGpu(stream));
  if (device.major != 9) {
    return absl::UnimplementedError(absl::StrCat(
        "shared_decode needs compute capability 9.0 and ", device.name, " has ", device.major, ".",
        device.minor, "; put the prefix's pages first in each history and use split_decode"));
  }
  const uint32_t num_splits = SplitsOf(params, device);
  CRUMB_ASSIGN_OR_RETURN(const size_t split_decode, SplitDecodeWorkspaceBytes(params.batch));
  const Workspace workspace = Arrange(params, num_splits, split_decode);
  if (params.batch.workspace_bytes < workspace.bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("workspace_bytes is ", params.batch.workspace_bytes, "; this shape needs ",
                     workspace.bytes, " on this device: ask SharedDecodeWorkspaceBytes"));
  }
  const auto at = [&](size_t offset) {
    return reinterpret_cast<float*>(static_cast<std::byte*>(params.batch.workspace) + offset);
  };
  const gpu::SharedPrefixLaunch launch{.batch = params.batch,
                                       .prefix = params.prefix,
                                       .prefix_pages = params.prefix_pages,
                                       .num_splits = num_splits,
                                       .outputs = at(workspace.outputs),
                                       .sums = at(workspace.sums),
                                       .own_outputs = at(workspace.own_outputs),
                                       .own_lse = at(workspace.own_lse)};
  SplitDecodeParams own = params.batch;
  own.out = at(workspace.own_outputs);
  own.out_type = ElementType::kFloat32;
  own.lse = at(workspace.own_lse);
  gpu::DecodeGrid grid = gpu::ChooseSplitDecodeGrid(own, device);
  grid.is_beside = true;
  CRUMB_RETURN_IF_ERROR(
      gpu::CudaStatus(gpu::LaunchSharedPrefix(launch, stream), "launching shared_decode"));
  CRUMB_RETURN_IF_ERROR(gpu::SplitDecodeOnGrid(own, grid, stream));
  return gpu::CudaStatus(gpu::LaunchSharedMerge(launch, stream), "launching shared_decode's merge");
}

}  // namespace crumb
