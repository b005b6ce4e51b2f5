// SPDX-License-Identifier: Apache-2.0
//
// Checksums of page images in a GPU's memory, computed there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"

#include "crumb/cuda/transfer.h"

namespace crumb {

// Head ranges that follow each other in device memory.
struct DeviceImage {
  const std::byte* ranges = nullptr;
  size_t range_bytes = 0;
};

// CRC-32C of each range, [image][range]: `num_ranges` of each image. One launch for images of one
// size that follow each other here. Waits for all of `stream`, of the current GPU.
// INVALID_ARGUMENT: ranges of a size that the kernel does not know (checksum_pages.h).
absl::StatusOr<std::vector<uint32_t>> ChecksumOnDevice(std::span<const DeviceImage> images,
                                                       uint32_t num_ranges,
                                                       const OwnGpuStream& stream);

}  // namespace crumb
