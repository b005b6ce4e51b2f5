// SPDX-License-Identifier: Apache-2.0
#include "daemon/tier/chunk_memory.h"

#include <sys/mman.h>

#include "proto/base/status_macros.h"

namespace crumb {

ChunkMemory::~ChunkMemory() {
  hold_ = nullptr;  // Before what it is of.
  ::munmap(bytes_.data(), bytes_.size());
}

absl::Status ChunkMemory::Prepare(const Holder& hold) {
  CRUMB_RETURN_IF_ERROR(Populate({.memfd = memfd(), .offset = 0, .units = &units_}, bytes_));
  is_populated_.store(true, std::memory_order_relaxed);
  hold_ = hold(bytes_);
  return absl::OkStatus();
}

}  // namespace crumb
