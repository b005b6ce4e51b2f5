// SPDX-License-Identifier: Apache-2.0
//
// First touch, in bulk. A page fault for each 4 KiB of new shared memory costs more than copying
// them. Where Linux can, fresh memory comes in huge pages of 2 MiB instead, whatever the machine's
// setting for shared memory is: a tenth of the time of small ones (9 ms of processor time for
// 176 MiB instead of 87, an EPYC), and everyone who reads the memory later is faster, a process
// that copies it from ours by cma three times. Else the range is asked for at once, which costs
// half of the faults; either way the answer is a status where memory runs out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"

#include "daemon/tier/huge_units.h"

namespace crumb {

// Memory of a memfd that nothing was ever written to.
struct FreshMemory {
  int memfd = -1;       // -1: not fresh. Its owner's; valid as long as the memory is.
  uint64_t offset = 0;  // In the file.
  // Of where all of the file is mapped, if huge pages may be used: any part of it may get its
  // memory earlier then, up to the next bounds of huge pages. Null: exactly the range gets it.
  HugeUnits* units = nullptr;
};

// Has the system give the memory that `bytes` maps. RESOURCE_EXHAUSTED: it has none. OK where it
// knows no such thing: the first writes do it then. No-op for memory that is not fresh. What others
// have written nearby stays. Blocking; Thread-safe.
absl::Status Populate(const FreshMemory& fresh, std::span<std::byte> bytes);

}  // namespace crumb
