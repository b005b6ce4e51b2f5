// SPDX-License-Identifier: Apache-2.0
#include "crumb/cuda/expand_pages.h"

#include "cuda/gpu/cuda_status.h"
#include "cuda/gpu/launch_gpu.h"
#include "cuda/gpu/take_word.h"
#include "cuda/launch/expand_pages.h"
#include "cuda/reference/expand_problem.h"
#include "proto/base/status_macros.h"

namespace crumb {

absl::Status ExpandPages(const ExpandPagesParams& params, GpuStream stream) {
  CRUMB_RETURN_IF_ERROR(ValidateExpandPages(params));
  CRUMB_ASSIGN_OR_RETURN(const GpuDevice device, gpu::LaunchGpu(stream));
  const gpu::LaunchExpandPages launch = params.heads.head_dim == 64    ? gpu::LaunchExpandPages64
                                        : params.heads.head_dim == 128 ? gpu::LaunchExpandPages128
                                                                       : gpu::LaunchExpandPages256;
  return gpu::CudaStatus(
      launch(params, /*has_warpgroups=*/device.major == 9, device.num_multiprocessors, stream),
      "launching expansion");
}

absl::Status TakeExpandPagesProblem(const ExpandPagesParams& params, GpuStream stream) {
  CRUMB_RETURN_IF_ERROR(ValidateExpandPages(params));
  CRUMB_ASSIGN_OR_RETURN(const uint64_t rows, gpu::TakeWord(params.rows_left_out, stream));
  return gpu::CheckRowsLeftOut(params, rows);
}

}  // namespace crumb
