// SPDX-License-Identifier: Apache-2.0
#include "daemon/transfer/staging_memory.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include <cerrno>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

#include "proto/base/huge_page.h"
#include "proto/wire/memory_socket.h"

// shared: the header says by whom.

namespace crumb {
namespace {

absl::Status CheckMemfd(int memfd, uint64_t bytes) {
  if (bytes == 0 || bytes > kMaxStagingBytes) {
    return absl::InvalidArgumentError(absl::StrCat("staging memory of ", bytes,
                                                   " bytes: it must have 1 to ", kMaxStagingBytes,
                                                   "; publish a longer prefix in parts"));
  }
  const int seals = fcntl(memfd, F_GET_SEALS);
  if (seals < 0) {
    return absl::InvalidArgumentError(
        "staging memory is not a memfd: make it by memfd_create with MFD_ALLOW_SEALING");
  }
  if ((seals & F_SEAL_SHRINK) == 0 || (seals & F_SEAL_GROW) == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "staging memory has seals ", seals, ", and must have F_SEAL_SHRINK and F_SEAL_GROW (",
        F_SEAL_SHRINK | F_SEAL_GROW, "): seal it by fcntl F_ADD_SEALS before handing it over"));
  }
  // A huge page may not be there when it is touched, and that is SIGBUS for whoever touches it.
  struct statfs file_system {};
  if (fstatfs(memfd, &file_system) != 0 || file_system.f_type != TMPFS_MAGIC) {
    return absl::InvalidArgumentError(
        "staging memory is of huge pages: make it by memfd_create without MFD_HUGETLB");
  }
  struct stat info {};
  if (fstat(memfd, &info) != 0 || static_cast<uint64_t>(info.st_size) != bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("staging memory has ", info.st_size, " bytes, but the request says ", bytes));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::shared_ptr<const StagingMemory>> StagingMemory::MapMemfd(int memfd,
                                                                             uint64_t bytes) {
  if (absl::Status status = CheckMemfd(memfd, bytes); !status.ok()) {
    return status;
  }
  void* address = MapAtHugePage(memfd, bytes, PROT_READ);
  if (address == MAP_FAILED) {
    return absl::ErrnoToStatus(errno, absl::StrCat("mmap of ", bytes, " bytes of staging memory"));
  }
  auto memory =
      std::make_shared<StagingMemory>(std::span(static_cast<const std::byte*>(address), bytes),
                                      [address, bytes] { munmap(address, bytes); });
  memory->is_kept_ = true;
  return memory;
}

bool StagingMemory::IsHeldByDevice(const std::function<std::shared_ptr<const void>()>& hold) const {
  Hold now = hold_.load(std::memory_order_acquire);
  if (is_kept_ && now == Hold::kNotAsked && hold_.compare_exchange_strong(now, Hold::kBeingMade)) {
    device_hold_ = hold();
    now = device_hold_ == nullptr ? Hold::kNone : Hold::kHeld;
    hold_.store(now, std::memory_order_release);
  }
  return now == Hold::kHeld;
}

}  // namespace crumb
