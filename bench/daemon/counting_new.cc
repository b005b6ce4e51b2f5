// SPDX-License-Identifier: Apache-2.0
#include "bench/daemon/counting_new.h"

#include <malloc.h>

#include <atomic>
#include <cstdlib>
#include <new>

namespace {

std::atomic<size_t> allocated_bytes = 0;

// What malloc keeps beside each allocation.
constexpr size_t kMallocHeaderBytes = 8;

void* Allocate(size_t bytes, size_t alignment) {
  void* memory = nullptr;
  if (::posix_memalign(&memory, alignment, bytes) != 0) {
    std::abort();
  }
  allocated_bytes += ::malloc_usable_size(memory) + kMallocHeaderBytes;
  return memory;
}

void Release(void* memory) {
  if (memory != nullptr) {
    allocated_bytes -= ::malloc_usable_size(memory) + kMallocHeaderBytes;
    std::free(memory);
  }
}

}  // namespace

namespace crumb::bench {

size_t AllocatedBytes() {
  return allocated_bytes;
}

}  // namespace crumb::bench

void* operator new(size_t bytes) {
  return Allocate(bytes, alignof(std::max_align_t));
}
void* operator new(size_t bytes, std::align_val_t alignment) {
  return Allocate(bytes, static_cast<size_t>(alignment));
}
void operator delete(void* memory) noexcept {
  Release(memory);
}
void operator delete(void* memory, size_t) noexcept {
  Release(memory);
}
void operator delete(void* memory, std::align_val_t) noexcept {
  Release(memory);
}
void operator delete(void* memory, size_t, std::align_val_t) noexcept {
  Release(memory);
}
