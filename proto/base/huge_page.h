// SPDX-License-Identifier: Apache-2.0
//
// Mappings of shared memory that its huge pages fit. Linux enters a huge page of a file into a
// process's page tables as one entry only where the mapping has it at a multiple of its size. All
// who map a chunk, its writer and its readers, do it here. Thread-safe.
#pragma once

#include <cstddef>

namespace crumb {

inline constexpr size_t kHugePageBytes = size_t{2} << 20;

// Maps the first `bytes` of a file, shared, with its start at the start of a huge page.
// `protection` as mmap's. MAP_FAILED, with errno; nothing is mapped then. The caller unmaps
// `bytes`.
void* MapAtHugePage(int fd, size_t bytes, int protection);

}  // namespace crumb
