// SPDX-License-Identifier: Apache-2.0
#include "crumb/cuda/transfer.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"

#include "cuda/gpu/cuda_status.h"
#include "proto/base/status_macros.h"

namespace crumb {

using gpu::CudaStatus;

namespace {

// Devices map memory in units of this, on bounds of as much: of one there is all or nothing.
constexpr uintptr_t kMappedBytes = uintptr_t{2} << 20;

// The first byte of the unit after that of `at`, or `last` if that comes before it.
const std::byte* NextUnit(const std::byte* at, const std::byte* last) {
  const uintptr_t left = kMappedBytes - reinterpret_cast<uintptr_t>(at) % kMappedBytes;
  return at + std::min<uintptr_t>(left, static_cast<uintptr_t>(last - at));
}

absl::Status CheckAddress(const std::byte* at, int current) {
  cudaPointerAttributes attributes = {};
  CRUMB_RETURN_IF_ERROR(
      CudaStatus(cudaPointerGetAttributes(&attributes, at), "asking what an address is in"));
  const bool is_on_device = attributes.type == cudaMemoryTypeDevice;
  if (is_on_device && attributes.device == current) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("address ", reinterpret_cast<uintptr_t>(at), " is in ",
                   is_on_device ? absl::StrCat("memory of GPU ", attributes.device)
                                : std::string("no memory of a GPU"),
                   ", it must be in that of GPU ", current));
}

}  // namespace

ScopedGpu::ScopedGpu(int device) {
  int current = -1;
  status_ = CudaStatus(cudaGetDevice(&current), "no GPU can be used");
  if (!status_.ok() || current == device) {
    return;
  }
  const cudaError_t error = cudaSetDevice(device);
  status_ = CudaStatus(error, absl::StrCat("making GPU ", device, " the current one"));
  if (error == cudaErrorInvalidDevice) {
    status_ = absl::InvalidArgumentError(
        absl::StrCat("GPU ", device, " is not there; `nvidia-smi -L` lists them, from 0"));
  }
  before_ = status_.ok() ? current : -1;
}

ScopedGpu::~ScopedGpu() {
  if (before_ >= 0) {
    cudaSetDevice(before_);
  }
}

absl::StatusOr<std::unique_ptr<OwnGpuStream>> OwnGpuStream::Create() {
  std::unique_ptr<OwnGpuStream> stream(new OwnGpuStream);
  // Not into stream_: a device without memory failed this and left a handle that was none.
  GpuStream made = nullptr;
  CRUMB_RETURN_IF_ERROR(
      CudaStatus(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), "making a stream"));
  stream->stream_ = made;
  return stream;
}

OwnGpuStream::~OwnGpuStream() {
  if (stream_ != nullptr) {
    cudaStreamDestroy(stream_);
  }
}

absl::Status OwnGpuStream::Wait() const {
  return CudaStatus(cudaStreamSynchronize(stream_), "waiting for a stream");
}

absl::StatusOr<std::unique_ptr<OwnGpuEvent>> OwnGpuEvent::Create() {
  std::unique_ptr<OwnGpuEvent> event(new OwnGpuEvent);
  cudaEvent_t made = nullptr;  // As a stream's.
  CRUMB_RETURN_IF_ERROR(
      CudaStatus(cudaEventCreateWithFlags(&made, cudaEventDisableTiming), "making an event"));
  event->event_ = made;
  return event;
}

OwnGpuEvent::~OwnGpuEvent() {
  if (event_ != nullptr) {
    cudaEventDestroy(event_);
  }
}

absl::Status OwnGpuEvent::Record(GpuStream stream) {
  return CudaStatus(cudaEventRecord(event_, stream), "recording an event");
}

absl::Status OwnGpuEvent::Delay(GpuStream stream) const {
  return CudaStatus(cudaStreamWaitEvent(stream, event_, 0), "having a stream wait for an event");
}

absl::Status OwnGpuEvent::Wait() const {
  return CudaStatus(cudaEventSynchronize(event_), "waiting for an event");
}

absl::StatusOr<std::unique_ptr<OwnGpuMemory>> OwnGpuMemory::Create(size_t bytes) {
  std::unique_ptr<OwnGpuMemory> memory(new OwnGpuMemory);
  CRUMB_RETURN_IF_ERROR(CudaStatus(cudaMalloc(&memory->data_, bytes),
                                   absl::StrCat("allocating ", bytes, " bytes of a GPU's memory")));
  memory->bytes_ = bytes;
  return memory;
}

OwnGpuMemory::~OwnGpuMemory() {
  cudaFree(data_);
}

absl::StatusOr<std::unique_ptr<OwnPinnedMemory>> OwnPinnedMemory::Create(size_t bytes) {
  std::unique_ptr<OwnPinnedMemory> memory(new OwnPinnedMemory);
  CRUMB_RETURN_IF_ERROR(
      CudaStatus(cudaMallocHost(&memory->data_, bytes),
                 absl::StrCat("allocating ", bytes, " bytes of pinned host memory")));
  memory->bytes_ = bytes;
  return memory;
}

OwnPinnedMemory::~OwnPinnedMemory() {
  cudaFreeHost(data_);
}

absl::StatusOr<std::unique_ptr<HostRegistration>> HostRegistration::Create(
    std::span<const std::byte> memory, bool is_read_only) {
  void* const address = const_cast<std::byte*>(memory.data());
  const cudaError_t error = cudaHostRegister(
      address, memory.size(), is_read_only ? cudaHostRegisterReadOnly : cudaHostRegisterDefault);
  if (error == cudaErrorNotSupported) {
    cudaGetLastError();
    return absl::UnimplementedError(
        "this GPU cannot read registered memory that the process may only read; copies go by way "
        "of the driver's own buffers");
  }
  CRUMB_RETURN_IF_ERROR(CudaStatus(
      error, absl::StrCat("registering ", memory.size(),
                          " bytes of host memory with a GPU; raise RLIMIT_MEMLOCK if it is low")));
  std::unique_ptr<HostRegistration> registration(new HostRegistration);
  registration->memory_ = memory.data();
  return registration;
}

HostRegistration::~HostRegistration() {
  if (memory_ != nullptr) {
    cudaHostUnregister(const_cast<std::byte*>(memory_));
  }
}

absl::Status CheckIsGpuMemory(const std::byte* data, size_t bytes) {
  int current = -1;
  CRUMB_RETURN_IF_ERROR(CudaStatus(cudaGetDevice(&current), "asking for the current GPU"));
  const std::byte* const last = data + bytes - 1;
  const std::byte* at = data;
  CRUMB_RETURN_IF_ERROR(CheckAddress(at, current));
  while (at != last) {
    at = NextUnit(at, last);
    CRUMB_RETURN_IF_ERROR(CheckAddress(at, current));
  }
  return absl::OkStatus();
}

absl::Status CopyToGpu(std::byte* target, std::span<const std::byte> source, GpuStream stream) {
  return CudaStatus(
      cudaMemcpyAsync(target, source.data(), source.size(), cudaMemcpyHostToDevice, stream),
      "copying to a GPU");
}

absl::Status CopyFromGpu(std::span<std::byte> target, const std::byte* source, GpuStream stream) {
  return CudaStatus(
      cudaMemcpyAsync(target.data(), source, target.size(), cudaMemcpyDeviceToHost, stream),
      "copying from a GPU");
}

absl::Status ClearGpu(std::byte* target, size_t bytes, GpuStream stream) {
  return CudaStatus(cudaMemsetAsync(target, 0, bytes, stream), "clearing a GPU's memory");
}

absl::Status CopyRowsToGpu(const GpuRowCopy& copy, GpuStream stream) {
  return CudaStatus(
      cudaMemcpy2DAsync(copy.target, copy.target_stride, copy.source, copy.source_stride,
                        copy.row_bytes, copy.rows, cudaMemcpyHostToDevice, stream),
      "copying rows to a GPU");
}

}  // namespace crumb
