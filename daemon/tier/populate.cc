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

namespace crumb {

absl::Status Populate(const FreshMemory& fresh, std::span<std::byte> bytes) {
  if (fresh.memfd < 0 || bytes.empty()) {
    return absl::OkStatus();
  }
  if (fresh.units != nullptr && fresh.units->Ask(bytes)) {
    return absl::OkStatus();
  }
  // Whole pages around the range: a rank's heads need not begin with one.
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t before = reinterpret_cast<uintptr_t>(bytes.data()) % page;
  const size_t length = (before + bytes.size() + page - 1) / page * page;
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
