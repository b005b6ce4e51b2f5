// SPDX-License-Identifier: Apache-2.0
//
// Staging memory that an engine changes while it is read: two bytes become a NaN's at the moment
// when another one is read for the first time. One at a time, since it takes SIGSEGV.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <span>

#include "proto/base/check.h"

namespace crumb {

// Confined to one thread.
class TouchySource {
 public:
  // A copy of `staging`, in which `aligned_offset` is at the start of a page of memory.
  TouchySource(std::span<const std::byte> staging, size_t aligned_offset)
      : mapped_bytes_(RoundUp(staging.size()) + 2 * page_bytes_) {
    mapping_ = static_cast<std::byte*>(
        mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    CRUMB_CHECK(mapping_ != MAP_FAILED, "memory");
    const size_t lead = RoundUp(aligned_offset) - aligned_offset;
    bytes_ = {mapping_ + lead, staging.size()};
    std::copy(staging.begin(), staging.end(), bytes_.begin());
    touchy_ = this;
    struct sigaction action {};
    action.sa_sigaction = [](int, siginfo_t*, void*) { touchy_->Change(); };
    action.sa_flags = static_cast<int>(SA_SIGINFO | SA_RESETHAND);  // The next one is a true one.
    sigaction(SIGSEGV, &action, &before_);
  }
  ~TouchySource() {
    sigaction(SIGSEGV, &before_, nullptr);
    munmap(mapping_, mapped_bytes_);
  }
  TouchySource(const TouchySource&) = delete;
  TouchySource& operator=(const TouchySource&) = delete;

  void ChangeWhenRead(size_t changed_offset, size_t read_offset) {
    changed_ = &bytes_[changed_offset];
    const auto address = reinterpret_cast<uintptr_t>(&bytes_[read_offset]);
    guarded_ = &bytes_[read_offset] - address % page_bytes_;
    mprotect(guarded_, page_bytes_, PROT_NONE);
  }
  std::span<const std::byte> bytes() const { return bytes_; }
  bool has_changed() const { return has_changed_; }

 private:
  size_t RoundUp(size_t bytes) const {
    return (bytes + page_bytes_ - 1) / page_bytes_ * page_bytes_;
  }
  void Change() {
    mprotect(guarded_, page_bytes_, PROT_READ | PROT_WRITE);
    changed_[0] = changed_[1] = std::byte{0xff};
    has_changed_ = true;
  }

  static inline TouchySource* touchy_ = nullptr;

  const size_t page_bytes_ = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t mapped_bytes_;
  std::byte* mapping_ = nullptr;
  std::span<std::byte> bytes_;
  std::byte* guarded_ = nullptr;
  std::byte* changed_ = nullptr;
  volatile bool has_changed_ = false;
  struct sigaction before_ {};
};

}  // namespace crumb
