// SPDX-License-Identifier: Apache-2.0
#include "crumb/cuda/prefill_attention.h"

#include "absl/strings/str_cat.h"

#include "cuda/gpu/cuda_status.h"
#include "cuda/gpu/launch_gpu.h"
#include "cuda/gpu/take_word.h"
#include "cuda/launch/prefill_attention.h"
#include "proto/base/status_macros.h"

namespace crumb {

namespace {

gpu::LaunchPrefillAttention FormFor(const GpuDevice& device, uint32_t head_dim) {
  const bool has_warpgroups = device.major == 9;
  switch (head_dim) {
    case 64:
      return has_warpgroups ? gpu::LaunchPrefillWarpgroups64 : gpu::LaunchPrefillAttention64;
    case 128:
      return has_warpgroups ? gpu::LaunchPrefillWarpgroups128 : gpu::LaunchPrefillAttention128;
    default:
      return gpu::LaunchPrefillAttention256;
  }
}

}  // namespace

absl::Status PrefillAttention(const PrefillAttentionParams& params, GpuStream stream) {
  CRUMB_RETURN_IF_ERROR(ValidatePrefillAttention(params));
  CRUMB_ASSIGN_OR_RETURN(const GpuDevice device, gpu::LaunchGpu(stream));
  const gpu::LaunchPrefillAttention launch = FormFor(device, params.head_dim);
  return gpu::CudaStatus(launch(params, stream), "launching prefill attention");
}

absl::Status TakePrefillAttentionProblem(const PrefillAttentionParams& params, GpuStream stream) {
  CRUMB_RETURN_IF_ERROR(ValidatePrefillAttention(params));
  if (params.null_pages == nullptr) {
    return absl::OkStatus();
  }
  CRUMB_ASSIGN_OR_RETURN(const uint64_t pages, gpu::TakeWord(params.null_pages, stream));
  return pages == 0 ? absl::OkStatus()
                    : absl::InvalidArgumentError(absl::StrCat(
                          "prefill attention met ", pages,
                          " null pages within history_pages and window_tokens; it took their keys "
                          "and values for zero: give it all pages"));
}

}  // namespace crumb
