// SPDX-License-Identifier: Apache-2.0
//
// Memory that this process fills with pages to publish and the daemon maps: a memfd sealed against
// shrinking and growing, so that neither side's reads can fault.
#pragma once

#include <cstddef>
#include <span>

#include "absl/status/statusor.h"

#include "proto/base/unique_fd.h"

namespace crumb {

// Move-only. Thread-compatible.
class StagingBuffer {
 public:
  StagingBuffer() = default;
  // RESOURCE_EXHAUSTED, with the size and the system's reason. Physical memory is taken as it is
  // touched or written.
  static absl::StatusOr<StagingBuffer> Create(size_t bytes);
  StagingBuffer(StagingBuffer&& other) noexcept;
  StagingBuffer& operator=(StagingBuffer&& other) noexcept;
  StagingBuffer(const StagingBuffer&) = delete;
  StagingBuffer& operator=(const StagingBuffer&) = delete;
  ~StagingBuffer();

  int memfd() const { return memfd_.get(); }
  std::span<std::byte> bytes() const { return bytes_; }

  // Has the system give the memory of the first `end` bytes, beyond those it was asked for before,
  // in huge pages where Linux can; else in small ones, as they are written.
  void Touch(size_t end);
  size_t touched_bytes() const { return touched_bytes_; }

 private:
  UniqueFd memfd_;
  std::span<std::byte> bytes_;
  size_t touched_bytes_ = 0;
};

}  // namespace crumb
