// SPDX-License-Identifier: Apache-2.0
//
// What a pull by cma cannot pass: the rate at which Linux copies another process's memory into ours
// (process_vm_readv), with nothing around it.
#pragma once

#include <sys/types.h>

#include <cstddef>

namespace crumb::bench {

// A process of our own that holds memory which has been written to, in huge pages, until this is
// destroyed. Make it before any thread. Confined to one thread.
class ForeignMemory {
 public:
  explicit ForeignMemory(size_t bytes);
  ~ForeignMemory();
  ForeignMemory(const ForeignMemory&) = delete;
  ForeignMemory& operator=(const ForeignMemory&) = delete;

  // GB/s of all of it, once, into as much memory, neither of them in the cache, as pages are.
  double ReadCold();
  // GB/s of its first `bytes` into one place, again and again, from the cache, as ucx_perftest
  // does.
  double ReadHot(size_t bytes);

 private:
  double Read(size_t bytes, size_t window);

  const size_t bytes_;
  std::byte* source_ = nullptr;  // The child's: no memory of this process.
  std::byte* target_ = nullptr;
  pid_t child_ = -1;
};

}  // namespace crumb::bench
