// SPDX-License-Identifier: Apache-2.0
#include "crumb/cuda/device.h"

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <memory>

#include "absl/strings/str_cat.h"

#include "cuda/gpu/cuda_status.h"
#include "proto/base/status_macros.h"

namespace crumb {

namespace gpu {

absl::Status CudaStatus(int error, std::string_view what) {
  const auto code = static_cast<cudaError_t>(error);
  if (code == cudaSuccess) {
    return absl::OkStatus();
  }
  cudaGetLastError();
  const std::string message =
      absl::StrCat(std::string(what), ": ", cudaGetErrorName(code), ", ", cudaGetErrorString(code));
  switch (code) {
    case cudaErrorMemoryAllocation:
      return absl::ResourceExhaustedError(message);
    case cudaErrorInvalidResourceHandle:
      return absl::InvalidArgumentError(
          absl::StrCat(message, "; streams and events must be alive, and of the current GPU"));
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorDevicesUnavailable:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInitializationError:
      return absl::UnavailableError(message);
    default:
      return absl::InternalError(message);
  }
}

}  // namespace gpu

namespace {

absl::StatusOr<GpuDevice> AskDevice(int index) {
  cudaDeviceProp properties = {};
  CRUMB_RETURN_IF_ERROR(
      gpu::CudaStatus(cudaGetDeviceProperties(&properties, index), "asking a GPU what it is"));
  GpuDevice device;
  device.index = index;
  device.name = properties.name;
  device.major = properties.major;
  device.minor = properties.minor;
  device.num_multiprocessors = static_cast<uint32_t>(properties.multiProcessorCount);
  device.l2_bytes = static_cast<size_t>(properties.l2CacheSize);
  device.shared_memory_per_block = properties.sharedMemPerBlockOptin;
  if (device.major < 8) {
    return absl::UnavailableError(
        absl::StrCat(device.name, " has compute capability ", device.major, ".", device.minor,
                     "; kernels need 8.0 or later: use another GPU, or the CPU's codec"));
  }
  return device;
}

}  // namespace

absl::StatusOr<GpuDevice> CurrentGpu() {
  int index = 0;
  CRUMB_RETURN_IF_ERROR(gpu::CudaStatus(
      cudaGetDevice(&index),
      "no GPU can be used; run on a machine with an NVIDIA GPU and a driver for CUDA 13"));
  // Asking takes a good part of a millisecond, launches a few microseconds: remembered for good.
  static std::array<std::atomic<const GpuDevice*>, 64> known;
  const auto slot = static_cast<size_t>(index);
  if (slot < known.size()) {
    if (const GpuDevice* device = known[slot].load(std::memory_order_acquire)) {
      return *device;
    }
  }
  CRUMB_ASSIGN_OR_RETURN(const GpuDevice device, AskDevice(index));
  if (slot < known.size()) {
    auto fresh = std::make_unique<const GpuDevice>(device);
    const GpuDevice* none = nullptr;
    if (known[slot].compare_exchange_strong(none, fresh.get(), std::memory_order_acq_rel)) {
      fresh.release();  // NOLINT(bugprone-unused-return-value): lives as long as the process.
    }
  }
  return device;
}

}  // namespace crumb
