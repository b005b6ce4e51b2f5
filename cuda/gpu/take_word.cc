// SPDX-License-Identifier: Apache-2.0
#include "cuda/gpu/take_word.h"

#include <cuda_runtime.h>

#include "cuda/gpu/cuda_status.h"
#include "proto/base/status_macros.h"

namespace crumb::gpu {

absl::StatusOr<uint64_t> TakeWord(uint64_t* word, GpuStream stream) {
  CRUMB_RETURN_IF_ERROR(CheckStream(stream));
  uint64_t value = 0;
  CRUMB_RETURN_IF_ERROR(
      CudaStatus(cudaMemcpyAsync(&value, word, sizeof(value), cudaMemcpyDeviceToHost, stream),
                 "reading what a launch found"));
  CRUMB_RETURN_IF_ERROR(
      CudaStatus(cudaMemsetAsync(word, 0, sizeof(value), stream), "clearing what a launch found"));
  CRUMB_RETURN_IF_ERROR(CudaStatus(cudaStreamSynchronize(stream), "waiting for a launch"));
  return value;
}

}  // namespace crumb::gpu
