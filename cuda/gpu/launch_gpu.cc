// SPDX-License-Identifier: Apache-2.0
#include "cuda/gpu/launch_gpu.h"

#include <cuda.h>

#include "absl/strings/str_cat.h"

#include "cuda/gpu/driver_function.h"
#include "proto/base/status_macros.h"

namespace crumb {

namespace gpu {
namespace {

// Of the functions that tell a stream's device, cuStreamGetCtx alone does not end a capture.
struct Driver {
  decltype(&cuStreamGetCtx) context_of = nullptr;
  decltype(&cuCtxGetCurrent) current = nullptr;
  decltype(&cuCtxPushCurrent) push = nullptr;
  decltype(&cuCtxPopCurrent) pop = nullptr;
  decltype(&cuCtxGetDevice) device = nullptr;
};

// Null: a driver without them, which then judges launches by itself.
const Driver* GetDriver() {
  static const Driver kDriver = [] {
    Driver d;
    const bool all = FindDriverFunction("cuStreamGetCtx", &d.context_of) &&
                     FindDriverFunction("cuCtxGetCurrent", &d.current) &&
                     FindDriverFunction("cuCtxPushCurrent", &d.push) &&
                     FindDriverFunction("cuCtxPopCurrent", &d.pop) &&
                     FindDriverFunction("cuCtxGetDevice", &d.device);
    return all ? d : Driver{};
  }();
  return kDriver.device != nullptr ? &kDriver : nullptr;
}

// A negative number where the driver does not say.
int DeviceOf(const Driver& driver, CUcontext context) {
  CUdevice device = -1;
  if (driver.push(context) == CUDA_SUCCESS) {
    driver.device(&device);
    driver.pop(&context);
  }
  return device;
}

}  // namespace

absl::StatusOr<GpuDevice> LaunchGpu(GpuStream stream) {
  CRUMB_ASSIGN_OR_RETURN(GpuDevice gpu, CurrentGpu());
  const Driver* const driver = GetDriver();
  CUcontext of_stream = nullptr;
  CUcontext current = nullptr;
  // The default streams are the current GPU's, and have no context yet where nothing ran on it.
  if (driver == nullptr || driver->context_of(stream, &of_stream) != CUDA_SUCCESS ||
      (driver->current(&current) == CUDA_SUCCESS && current == of_stream)) {
    return gpu;
  }
  const int device = DeviceOf(*driver, of_stream);
  if (device >= 0 && device != gpu.index) {
    return absl::InvalidArgumentError(
        absl::StrCat("the stream is of GPU ", device, " and the current GPU is ", gpu.index,
                     ": give a stream of the current GPU, or make the stream's current"));
  }
  return gpu;
}

}  // namespace gpu

absl::Status CheckStream(GpuStream stream) {
  return gpu::LaunchGpu(stream).status();
}

}  // namespace crumb
