// SPDX-License-Identifier: Apache-2.0
//
// A memfd of the daemon's, mapped read-only.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <utility>

#include "absl/status/statusor.h"

namespace crumb {

// Move-only. Thread-compatible.
class SealedMapping {
 public:
  // FAILED_PRECONDITION: not sealed against shrinking, which would let a read fault.
  // RESOURCE_EXHAUSTED: no address space. Both name `what` is mapped.
  static absl::StatusOr<SealedMapping> Map(int memfd, size_t bytes, const std::string& what);
  SealedMapping() = default;
  ~SealedMapping();
  SealedMapping(SealedMapping&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}
  SealedMapping& operator=(SealedMapping&& other) noexcept {
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  SealedMapping(const SealedMapping&) = delete;
  SealedMapping& operator=(const SealedMapping&) = delete;

  const std::byte* data() const { return bytes_.data(); }

 private:
  explicit SealedMapping(std::span<const std::byte> bytes) : bytes_(bytes) {}

  std::span<const std::byte> bytes_;
};

}  // namespace crumb
