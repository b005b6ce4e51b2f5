// SPDX-License-Identifier: Apache-2.0
//
// First touch, in bulk. A page fault for each 4 KiB of new shared memory costs more than copying
// them; asking for a whole range costs about half of that (160 ms of system time for 214 MB by
// faults, 90 so; publish_bench, an EPYC), and the answer is a status where memory runs out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"

namespace crumb {

// Memory of a memfd that nothing was ever written to.
struct FreshMemory {
  int memfd = -1;       // -1: not fresh. Its owner's; valid as long as the memory is.
  uint64_t offset = 0;  // In the file.
};

// Has the system give the memory that `bytes` maps. RESOURCE_EXHAUSTED: it has none. OK where it
// knows no such thing: the first writes do it then. No-op for memory that is not fresh. Blocking;
// Thread-safe.
absl::Status Populate(const FreshMemory& fresh, std::span<std::byte> bytes);

}  // namespace crumb
