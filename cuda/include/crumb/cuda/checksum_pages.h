// SPDX-License-Identifier: Apache-2.0
//
// CRC-32C of page bytes in device memory, one a page and head range: a page that was pulled or
// demoted there is verified or described without a trip to the host. The values are Crc32c's
// (proto/base/crc32c.h). Bound by reading the bytes.
//
// No allocation, no synchronisation, capturable in a CUDA graph. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"

#include "crumb/cuda/device.h"

namespace crumb {

struct ChecksumPagesParams {
  uint32_t num_pages = 0;
  uint32_t num_ranges = 0;  // Of a page: its head ranges.
  // [num_pages], 16-byte aligned. Checksums of a null page are 0, as of no bytes.
  const std::byte* const* pages = nullptr;
  size_t offset = 0;        // Of the first range in a page image.
  size_t range_stride = 0;  // Geometry::HeadRangeBytes.
  // A multiple of 512, as head ranges of head_dim 64, 128 and 256 are in either encoding.
  size_t range_bytes = 0;
  uint32_t* checksums = nullptr;  // Out: [num_pages, num_ranges].
};

// What can be told without reading device memory. INVALID_ARGUMENT names the field, its value and
// the limit.
absl::Status ValidateChecksumPages(const ChecksumPagesParams& params);

// Validates and enqueues on `stream`. INVALID_ARGUMENT as ValidateChecksumPages, UNIMPLEMENTED or
// UNAVAILABLE as CurrentGpu, INTERNAL with CUDA's words for a launch that was refused.
absl::Status ChecksumPages(const ChecksumPagesParams& params, GpuStream stream);

// The twin, with pointers to host memory: Crc32c of each range.
absl::Status ChecksumPagesReference(const ChecksumPagesParams& params);

}  // namespace crumb
