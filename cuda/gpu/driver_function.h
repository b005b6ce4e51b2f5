// SPDX-License-Identifier: Apache-2.0
//
// Functions of the NVIDIA driver, found at run time: programs start where there is no driver at
// all.
#pragma once

#include <cuda_runtime.h>

namespace crumb::gpu {

// Sets `function` to the driver's function `name`, in the form that cuda.h of CUDA 12 and 13
// declares. False: there is no driver, or it has none of that name. Thread-safe.
template <typename Function>
bool FindDriverFunction(const char* name, Function* function) {
  constexpr unsigned kVersion = 12000;
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  if (cudaGetDriverEntryPointByVersion(name, &found, kVersion, cudaEnableDefault, &result) !=
          cudaSuccess ||
      result != cudaDriverEntryPointSuccess) {
    cudaGetLastError();
    return false;
  }
  *function = reinterpret_cast<Function>(found);
  return true;
}

}  // namespace crumb::gpu
