// SPDX-License-Identifier: Apache-2.0
//
// Mappings of shared memory that its huge pages fit. Linux enters a huge page of a file into a
// process's page tables as one entry only where the mapping has it at a multiple of its size. All
// who map a chunk, its writer and its readers, do it here. Thread-safe.
#pragma once

#include <cstddef>
#include <span>

namespace crumb {

inline constexpr size_t kHugePageBytes = size_t{2} << 20;

// Maps the first `bytes` of a file, shared, with its start at the start of a huge page.
// `protection` as mmap's. MAP_FAILED, with errno; nothing is mapped then. The caller unmaps
// `bytes`.
void* MapAtHugePage(int fd, size_t bytes, int protection);

// Asks for huge pages for those whole units of `mapping`, which MapAtHugePage made, that `bytes`, a
// part of it, touches; so these units have memory on return, written to or not. Only a wish: older
// systems than Linux 6.1 do not know it, and memory may be in pieces. Whether it was granted.
// Blocking.
bool AskForHugePages(std::span<std::byte> mapping, std::span<std::byte> bytes);

}  // namespace crumb
