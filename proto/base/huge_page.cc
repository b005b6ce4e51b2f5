// SPDX-License-Identifier: Apache-2.0
#include "proto/base/huge_page.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14; absent from older C libraries.
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1.
#endif

namespace crumb {

void* MapAtHugePage(int fd, size_t bytes, int protection) {
  const size_t reserved_bytes = bytes + kHugePageBytes;
  void* reserved = ::mmap(nullptr, reserved_bytes, PROT_NONE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) {
    return MAP_FAILED;
  }
  auto* const begin = static_cast<std::byte*>(reserved);
  const size_t skipped = -reinterpret_cast<uintptr_t>(begin) % kHugePageBytes;
  void* memory = ::mmap(begin + skipped, bytes, protection, MAP_SHARED | MAP_FIXED, fd, 0);
  if (memory == MAP_FAILED) {
    const int why = errno;
    ::munmap(reserved, reserved_bytes);
    errno = why;
    return MAP_FAILED;
  }
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t end = (skipped + bytes + page - 1) / page * page;
  if (skipped > 0) {
    ::munmap(begin, skipped);
  }
  if (end < reserved_bytes) {
    ::munmap(begin + end, reserved_bytes - end);
  }
  return memory;
}

bool AskForHugePages(std::span<std::byte> mapping, std::span<std::byte> bytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t begin = static_cast<size_t>(bytes.data() - mapping.data());
  const size_t end = begin + bytes.size();
  for (size_t unit = begin / kHugePageBytes * kHugePageBytes;
       unit < end && unit + kHugePageBytes <= mapping.size(); unit += kHugePageBytes) {
    // Nothing is collapsed where there is nothing at all.
    if (::madvise(&mapping[unit], page, MADV_POPULATE_WRITE) != 0 ||
        ::madvise(&mapping[unit], kHugePageBytes, MADV_COLLAPSE) != 0) {
      return false;
    }
  }
  return true;
}

}  // namespace crumb
