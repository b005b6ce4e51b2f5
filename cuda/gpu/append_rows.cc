// SPDX-License-Identifier: Apache-2.0
#include "crumb/cuda/append_rows.h"

#include "absl/strings/str_cat.h"

#include "cuda/gpu/cuda_status.h"
#include "cuda/gpu/launch_gpu.h"
#include "cuda/gpu/take_word.h"
#include "cuda/launch/append_rows.h"
#include "proto/base/status_macros.h"
#include "proto/page/page_format.h"

namespace crumb {

absl::Status AppendRows(const AppendRowsParams& params, GpuStream stream) {
  CRUMB_RETURN_IF_ERROR(ValidateAppendRows(params));
  CRUMB_ASSIGN_OR_RETURN(const GpuDevice device, gpu::LaunchGpu(stream));
  const int error =
      gpu::LaunchAppendRows(params, device.num_multiprocessors, device.major >= 9, stream);
  return gpu::CudaStatus(error, "launching append_rows");
}

absl::Status TakeAppendRowsProblem(const AppendRowsParams& params, GpuStream stream) {
  CRUMB_RETURN_IF_ERROR(ValidateAppendRows(params));
  CRUMB_ASSIGN_OR_RETURN(const uint64_t tokens, gpu::TakeWord(params.tokens_left_out, stream));
  if (tokens == 0) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "append_rows left out ", tokens, " tokens whose sequence is not below ", params.num_sequences,
      ", whose slot is not below ", uint64_t{params.stride} * kPageTokens,
      " or whose page is null: give them pages, or kNoSlot where they are padding"));
}

}  // namespace crumb
