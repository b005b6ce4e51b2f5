// SPDX-License-Identifier: Apache-2.0
//
// Counts what the program has allocated: link counting_new.cc, and every operator new is counted.
#pragma once

#include <cstddef>

namespace crumb::bench {

// Bytes that live allocations take of the heap, the allocator's rounding included.
size_t AllocatedBytes();

}  // namespace crumb::bench
