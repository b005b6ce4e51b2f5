// SPDX-License-Identifier: Apache-2.0
#include "crumb/cuda/split_decode.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "absl/strings/str_cat.h"

#include "cuda/gpu/cuda_status.h"
#include "cuda/gpu/decode_grid.h"
#include "cuda/gpu/launch_gpu.h"
#include "cuda/launch/decode_workspace.h"
#include "proto/base/status_macros.h"

namespace crumb {

namespace gpu {
namespace {

constexpr uint32_t kHeadsOfTile = 4;
constexpr uint32_t kMaxMultiprocessors = DecodeWorkspace::kMaxBlocks / 2;

uint32_t TilesOf(const DecodeGrid& grid) {
  return (grid.heads_of_pass + kHeadsOfTile - 1) / kHeadsOfTile;
}

// Passes over a KV head, none larger than a kernel of this form takes.
DecodeGrid PassesOf(const SplitDecodeParams& params, const SplitDecodeForm& form) {
  const uint32_t group = params.num_query_heads / params.num_kv_heads;
  const uint32_t most = form.max_tiles * kHeadsOfTile;
  DecodeGrid grid;
  grid.passes = (group + most - 1) / most;
  grid.heads_of_pass = std::min(group, most);
  return grid;
}

}  // namespace

const SplitDecodeForm* SplitDecodeFormOf(uint32_t head_dim) {
  switch (head_dim) {
    case 64:
      return &kSplitDecode64;
    case 128:
      return &kSplitDecode128;
    case 256:
      return &kSplitDecode256;
    default:
      return nullptr;
  }
}

// Measured on an H200 for four query heads a KV head. Sixteen warps a multiprocessor hide best what
// a warp waits for; a ring of two stages each is as deep as it needs. Little work and a single
// sequence are done sooner by fewer warps, whose results are merged sooner; much work sooner by two
// blocks, of which one works while the other merges.
DecodeGrid ChooseSplitDecodeGrid(const SplitDecodeParams& params, const GpuDevice& device) {
  const SplitDecodeForm& form = *SplitDecodeFormOf(params.head_dim);
  DecodeGrid grid = PassesOf(params, form);
  const uint32_t tiles = TilesOf(grid);
  const uint64_t pairs = uint64_t{params.num_sequences} * params.num_kv_heads * grid.passes;
  const uint32_t multiprocessors = std::min(device.num_multiprocessors, kMaxMultiprocessors);
  const bool has_sixteen = form.max_warps(tiles) >= 16;
  const bool is_little = pairs * params.history.stride <= uint64_t{64} * multiprocessors;
  const bool is_much = pairs >= multiprocessors;
  grid.num_warps = has_sixteen && !is_little && !is_much ? 16 : 8;
  grid.num_stages = has_sixteen ? 2 : 5;
  grid.num_blocks = multiprocessors * (has_sixteen && is_much ? 2 : 1);
  const auto fits = [&] {
    const size_t bytes = form.shared_bytes(tiles, grid.num_warps, grid.num_stages);
    return bytes <= device.shared_memory_per_block;
  };
  while (grid.num_stages > 2 && !fits()) {
    --grid.num_stages;
  }
  while (grid.num_warps > 1 && !fits()) {
    --grid.num_warps;
  }
  // A launch of much work has little to gain, and was up to 20 % slower where it began among the
  // last blocks of the one ahead: see docs/decisions/0110-equal-shares-of-bytes.md.
  grid.overlaps = !is_much;
  if (params.num_sequences == 1 && 2 * pairs <= multiprocessors) {
    const auto team = static_cast<uint32_t>(multiprocessors / pairs);
    if (team * pairs * 8 >= uint64_t{multiprocessors} * 7) {
      grid.team = team;
      const bool is_short = pairs * params.history.stride <= uint64_t{16} * multiprocessors;
      grid.num_warps =
          has_sixteen && !is_short ? kMaxWarpsOfTeam : std::min(grid.num_warps, kMaxWarpsOfTeam);
      grid.num_blocks = team * static_cast<uint32_t>(pairs);
      return grid;
    }
  }
  // Where all sequences are of one length, a whole number of blocks a pair lets no block work on
  // two pairs. Worth a few idle multiprocessors.
  if (pairs <= grid.num_blocks) {
    const auto whole = static_cast<uint32_t>(grid.num_blocks / pairs * pairs);
    if (whole * 8 >= grid.num_blocks * 7) {
      grid.num_blocks = whole;
    }
  }
  return grid;
}

size_t DecodeWorkspaceBytes(const SplitDecodeParams& params, uint32_t num_blocks) {
  const DecodeGrid grid = PassesOf(params, *SplitDecodeFormOf(params.head_dim));
  return DecodeWorkspace{num_blocks, TilesOf(grid) * kHeadsOfTile, params.head_dim}.bytes();
}

absl::Status SplitDecodeOnGrid(const SplitDecodeParams& params,
                               const DecodeGrid& grid,
                               GpuStream stream) {
  const size_t needed = DecodeWorkspaceBytes(params, grid.num_blocks);
  if (params.workspace_bytes < needed) {
    return absl::InvalidArgumentError(
        absl::StrCat("workspace_bytes is ", params.workspace_bytes, "; this shape needs ", needed,
                     " on this device: ask SplitDecodeWorkspaceBytes"));
  }
  const int error = SplitDecodeFormOf(params.head_dim)->launch(params, grid, stream);
  return CudaStatus(error, "launching split_decode");
}

}  // namespace gpu

absl::StatusOr<size_t> SplitDecodeWorkspaceBytes(const SplitDecodeParams& params) {
  CRUMB_ASSIGN_OR_RETURN(const GpuDevice device, CurrentGpu());
  if (gpu::SplitDecodeFormOf(params.head_dim) == nullptr || params.num_kv_heads == 0) {
    return ValidateSplitDecode(params);
  }
  return gpu::DecodeWorkspaceBytes(
      params, std::min(2 * device.num_multiprocessors, gpu::DecodeWorkspace::kMaxBlocks));
}

absl::Status SplitDecode(const SplitDecodeParams& params, GpuStream stream) {
  CRUMB_RETURN_IF_ERROR(ValidateSplitDecode(params));
  CRUMB_ASSIGN_OR_RETURN(const GpuDevice device, gpu::LaunchGpu(stream));
  return gpu::SplitDecodeOnGrid(params, gpu::ChooseSplitDecodeGrid(params, device), stream);
}

absl::Status TakeSplitDecodeProblem(const SplitDecodeParams& params, GpuStream stream) {
  CRUMB_RETURN_IF_ERROR(ValidateSplitDecode(params));
  CRUMB_RETURN_IF_ERROR(CheckStream(stream));
  gpu::DecodeFindings findings;
  CRUMB_RETURN_IF_ERROR(
      gpu::CudaStatus(cudaMemcpyAsync(&findings, params.workspace, sizeof(findings),
                                      cudaMemcpyDeviceToHost, stream),
                      "reading split_decode's findings"));
  CRUMB_RETURN_IF_ERROR(gpu::CudaStatus(
      cudaMemsetAsync(params.workspace, 0, sizeof(findings), stream), "clearing the findings"));
  CRUMB_RETURN_IF_ERROR(gpu::CudaStatus(cudaStreamSynchronize(stream), "waiting for split_decode"));
  if (findings.problems == 0) {
    return absl::OkStatus();
  }
  std::string what;
  const auto add = [&](gpu::DecodeProblem problem, std::string_view text) {
    if ((findings.problems & problem) != 0) {
      absl::StrAppend(&what, what.empty() ? "" : " and ", std::string(text));
    }
  };
  add(gpu::kNullHistoryPage, "a null page within history_pages");
  add(gpu::kNullWindowPage, "a null page within window_tokens");
  add(gpu::kHistoryBeyondTable,
      absl::StrCat("history_pages beyond the table's stride of ", params.history.stride));
  add(gpu::kPrefixBeyondTable, "prefix_pages beyond the prefix's table");
  add(gpu::kPartMissing,
      "that a block's part never came (lengths that changed while a launch ran, or "
      "a workspace that two used at once: zero the workspace)");
  add(gpu::kWindowBeyondTable,
      absl::StrCat("window_tokens beyond the table's stride of ", params.windows.stride, " pages"));
  return absl::InvalidArgumentError(
      absl::StrCat("split_decode found ", what, "; the last sequence that has one is ",
                   findings.sequence, ": outputs are over the pages that are there"));
}

}  // namespace crumb
