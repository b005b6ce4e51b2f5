// SPDX-License-Identifier: Apache-2.0
#include "client/transport/sealed_mapping.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

#include "proto/base/huge_page.h"

namespace crumb {

absl::StatusOr<SealedMapping> SealedMapping::Map(int memfd, size_t bytes, const std::string& what) {
  const int seals = ::fcntl(memfd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    return absl::FailedPreconditionError(
        absl::StrCat(what,
                     " is not sealed against shrinking, so reading it could fault; is another "
                     "program serving the memory socket?"));
  }
  void* base = MapAtHugePage(memfd, bytes, PROT_READ);
  if (base == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat(what, ": cannot map ", bytes, " bytes: ",
                     std::strerror(errno)));  // NOLINT(concurrency-mt-unsafe)
  }
  return SealedMapping(std::span(static_cast<const std::byte*>(base), bytes));
}

SealedMapping::~SealedMapping() {
  if (!bytes_.empty()) {
    ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
  }
}

}  // namespace crumb
