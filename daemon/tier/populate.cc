// SPDX-License-Identifier: Apache-2.0
#include "daemon/tier/populate.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "absl/strings/str_cat.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14; absent from older C libraries.
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1.
#endif

namespace crumb {
namespace {

// Huge pages for those whole units of the mapping that `bytes` touches. Only a wish: older systems
// do not know it, and memory may be in pieces.
void WishHugePages(std::span<std::byte> mapping, std::span<std::byte> bytes, size_t page) {
  const size_t begin = static_cast<size_t>(bytes.data() - mapping.data());
  const size_t end = begin + bytes.size();
  for (size_t unit = begin / kHugePageBytes * kHugePageBytes;
       unit < end && unit + kHugePageBytes <= mapping.size(); unit += kHugePageBytes) {
    // Nothing is collapsed where there is nothing at all.
    if (::madvise(&mapping[unit], page, MADV_POPULATE_WRITE) != 0 ||
        ::madvise(&mapping[unit], kHugePageBytes, MADV_COLLAPSE) != 0) {
      return;
    }
  }
}

}  // namespace

absl::Status Populate(const FreshMemory& fresh, std::span<std::byte> bytes) {
  if (fresh.memfd < 0 || bytes.empty()) {
    return absl::OkStatus();
  }
  // Whole pages around the range: a rank's heads need not begin with one.
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t before = reinterpret_cast<uintptr_t>(bytes.data()) % page;
  const size_t length = (before + bytes.size() + page - 1) / page * page;
  if (!fresh.mapping.empty()) {
    WishHugePages(fresh.mapping, bytes, page);
  }
  // Two steps, since allocating in the file and mapping what is there cost less than one that does
  // both.
  if (::fallocate(fresh.memfd, 0, static_cast<off_t>(fresh.offset - before),
                  static_cast<off_t>(length)) != 0 &&
      (errno == ENOSPC || errno == ENOMEM)) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "memory for ", length, " bytes of a block: ", std::generic_category().message(errno),
        "; lower [store] capacity, or raise the machine's or the service's limit of memory"));
  }
  static_cast<void>(::madvise(bytes.data() - before, length, MADV_POPULATE_WRITE));
  return absl::OkStatus();
}

}  // namespace crumb
