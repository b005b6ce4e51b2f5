// SPDX-License-Identifier: Apache-2.0
//
// Preloaded into ucx_perftest by pull_bench. ucx_perftest never writes to the buffer it sends, so
// Linux backs all of it by one page of zeros: whatever the size of a message, its source is in the
// cache, and nothing has been measured of memory. This library writes to the buffers that UCX
// allocates, when it asks for huge pages for them. UCX_MEM_MMAP_HOOK_MODE=none must be set, since
// UCX's own hook would be called instead.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>

// NOLINTNEXTLINE(readability-inconsistent-declaration-parameter-name): the system's are reserved.
extern "C" int madvise(void* address, size_t bytes, int advice) noexcept {
  const auto result = static_cast<int>(syscall(SYS_madvise, address, bytes, advice));
  if (advice == MADV_HUGEPAGE) {
    std::memset(address, 1, bytes);
  }
  return result;
}
