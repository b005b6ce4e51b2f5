// SPDX-License-Identifier: Apache-2.0
//
// Device memory that processes of one node share: one makes it, others map it by a descriptor that
// they were passed over a Unix socket (SCM_RIGHTS), for reading only, and run kernels on it in
// place. The memory lives until the last of them has unmapped it and closed its descriptor: whoever
// made it may be dead by then.
//
// Physical memory of CUDA's virtual memory management (cuMemCreate), not cudaIpcGetMemHandle's: a
// descriptor is passed like a memfd and cannot be guessed, readers cannot write, and the life of
// the memory does not hang on its owner's.
//
// A build without CUDA has the same functions and answers UNIMPLEMENTED. They leave the calling
// thread's current device as it was, and no error of CUDA's behind.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "proto/base/unique_fd.h"

namespace crumb {

// Names a GPU in every process of a node, whatever numbers they give it.
using GpuUuid = std::array<uint8_t, 16>;

// `device` is a number of cudaSetDevice. As CurrentGpu; INVALID_ARGUMENT: no such number.
absl::StatusOr<GpuUuid> GetGpuUuid(int device);

// Thread-compatible. Destroy it only when no kernel or copy that uses it is under way.
class SharedGpuMemory {
 public:
  // At least `bytes`, all zero, for this process to write. RESOURCE_EXHAUSTED: the device has no
  // memory, or this process no descriptor, with the bytes asked for. UNIMPLEMENTED: a device that
  // cannot share. Blocking.
  static absl::StatusOr<std::unique_ptr<SharedGpuMemory>> Create(int device, size_t bytes);
  // What another process made with the same `bytes` on the same GPU. The descriptor may be closed
  // on return. FAILED_PRECONDITION: it is no descriptor of such memory.
  static absl::StatusOr<std::unique_ptr<SharedGpuMemory>> Open(int device, int fd, size_t bytes);
  ~SharedGpuMemory();
  SharedGpuMemory(const SharedGpuMemory&) = delete;
  SharedGpuMemory& operator=(const SharedGpuMemory&) = delete;

  std::byte* data() const { return data_; }  // Device memory, on a bound of 2 MiB.
  size_t bytes() const { return bytes_; }    // In whole units of the device.
  // To pass on; this object's. -1 for what was opened.
  int fd() const { return fd_.get(); }

 private:
  SharedGpuMemory() = default;

  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  UniqueFd fd_;
};

}  // namespace crumb
