// SPDX-License-Identifier: Apache-2.0
//
// Memory for one page image, aligned for vector loads and for registration with devices. Move-only.
#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <span>

namespace crumb {

class PageBuffer {
 public:
  static constexpr size_t kAlignment = 4096;

  PageBuffer() = default;
  // Its bytes are indeterminate. Null when the system has no memory.
  static PageBuffer Allocate(size_t bytes) {
    PageBuffer buffer;
    buffer.bytes_.reset(static_cast<std::byte*>(
        ::operator new (bytes, std::align_val_t{kAlignment}, std::nothrow)));
    return buffer;
  }

  explicit operator bool() const { return bytes_ != nullptr; }
  std::byte* data() { return bytes_.get(); }
  const std::byte* data() const { return bytes_.get(); }
  void Reset() { bytes_.reset(); }

 private:
  struct Free {
    void operator()(std::byte* bytes) const {
      ::operator delete (bytes, std::align_val_t{kAlignment});
    }
  };
  std::unique_ptr<std::byte, Free> bytes_;
};

}  // namespace crumb
