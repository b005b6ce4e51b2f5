// SPDX-License-Identifier: Apache-2.0
//
// Streams, events and copies for code that knows nothing of CUDA's headers. A build without CUDA
// has the same functions and answers UNIMPLEMENTED.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "crumb/cuda/device.h"

struct CUevent_st;

namespace crumb {

using GpuEvent = CUevent_st*;  // A cudaEvent_t.

// Makes a device the calling thread's current one while it lives. Confined to its thread.
class ScopedGpu {
 public:
  explicit ScopedGpu(int device);
  ~ScopedGpu();
  ScopedGpu(const ScopedGpu&) = delete;
  ScopedGpu& operator=(const ScopedGpu&) = delete;

  // INVALID_ARGUMENT: no such device. RESOURCE_EXHAUSTED: it has no memory for this process's
  // context. Else as CurrentGpu.
  const absl::Status& status() const { return status_; }

 private:
  [[maybe_unused]] int before_ = -1;  // Not in a build without CUDA.
  absl::Status status_;
};

// A stream of its own on the current device, that waits for no other. Thread-safe, as streams are.
class OwnGpuStream {
 public:
  static absl::StatusOr<std::unique_ptr<OwnGpuStream>> Create();
  ~OwnGpuStream();
  OwnGpuStream(const OwnGpuStream&) = delete;
  OwnGpuStream& operator=(const OwnGpuStream&) = delete;

  GpuStream get() const { return stream_; }
  // Blocks until all that was enqueued is done; the first error of it.
  absl::Status Wait() const;

 private:
  OwnGpuStream() = default;
  GpuStream stream_ = nullptr;
};

// A point of a stream that others wait for. Thread-compatible.
class OwnGpuEvent {
 public:
  static absl::StatusOr<std::unique_ptr<OwnGpuEvent>> Create();
  ~OwnGpuEvent();
  OwnGpuEvent(const OwnGpuEvent&) = delete;
  OwnGpuEvent& operator=(const OwnGpuEvent&) = delete;

  GpuEvent get() const { return event_; }
  absl::Status Record(GpuStream stream);
  // What is enqueued on `stream` from now on waits for the point. Does not block.
  absl::Status Delay(GpuStream stream) const;
  absl::Status Wait() const;

 private:
  OwnGpuEvent() = default;
  GpuEvent event_ = nullptr;
};

// Memory of the current device for this process alone. RESOURCE_EXHAUSTED with the bytes.
class OwnGpuMemory {
 public:
  static absl::StatusOr<std::unique_ptr<OwnGpuMemory>> Create(size_t bytes);
  ~OwnGpuMemory();
  OwnGpuMemory(const OwnGpuMemory&) = delete;
  OwnGpuMemory& operator=(const OwnGpuMemory&) = delete;

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  OwnGpuMemory() = default;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

// Host memory that devices copy from and to by themselves: copies neither block the caller nor wait
// for a buffer of the driver's. RESOURCE_EXHAUSTED with the bytes.
class OwnPinnedMemory {
 public:
  static absl::StatusOr<std::unique_ptr<OwnPinnedMemory>> Create(size_t bytes);
  ~OwnPinnedMemory();
  OwnPinnedMemory(const OwnPinnedMemory&) = delete;
  OwnPinnedMemory& operator=(const OwnPinnedMemory&) = delete;

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  OwnPinnedMemory() = default;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

// Host memory that devices read by themselves while this lives: copies from it run at the bus's
// speed and beside other work. Of memory that this process may only read, too, where the device can
// (else UNIMPLEMENTED). RESOURCE_EXHAUSTED: it may not be locked (RLIMIT_MEMLOCK).
class HostRegistration {
 public:
  // Whole pages of the machine, mapped.
  static absl::StatusOr<std::unique_ptr<HostRegistration>> Create(std::span<const std::byte> memory,
                                                                  bool is_read_only);
  ~HostRegistration();
  HostRegistration(const HostRegistration&) = delete;
  HostRegistration& operator=(const HostRegistration&) = delete;

 private:
  HostRegistration() = default;
  [[maybe_unused]] const std::byte* memory_ = nullptr;  // As before_.
};

// Whether a range, not empty, is in memory of the current device, all of it. INVALID_ARGUMENT says
// what it is in instead. For pointers that somebody else has handed in: a kernel that reads others
// ends all work of the process on the device.
absl::Status CheckIsGpuMemory(const std::byte* data, size_t bytes);

// Enqueue on `stream`. From or to memory that is not registered, the call may block until the bytes
// have been taken.
absl::Status CopyToGpu(std::byte* target, std::span<const std::byte> source, GpuStream stream);
absl::Status CopyFromGpu(std::span<std::byte> target, const std::byte* source, GpuStream stream);
// Zeroes device memory.
absl::Status ClearGpu(std::byte* target, size_t bytes, GpuStream stream);

// `rows` rows of `row_bytes` each, a row every `source_stride` and `target_stride` bytes.
struct GpuRowCopy {
  std::byte* target = nullptr;  // Device memory.
  size_t target_stride = 0;
  const std::byte* source = nullptr;  // Host memory.
  size_t source_stride = 0;
  size_t row_bytes = 0;
  size_t rows = 0;
};
absl::Status CopyRowsToGpu(const GpuRowCopy& copy, GpuStream stream);

}  // namespace crumb
