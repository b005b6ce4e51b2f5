// SPDX-License-Identifier: Apache-2.0
#include "absl/strings/str_cat.h"

#include "crumb/cuda/checksum_pages.h"
#include "cuda/gpu/check_params.h"
#include "cuda/launch/checksum_pages.h"
#include "proto/base/crc32c.h"
#include "proto/base/status_macros.h"
#include "proto/page/geometry.h"

namespace crumb {

absl::Status ValidateChecksumPages(const ChecksumPagesParams& params) {
  CRUMB_RETURN_IF_ERROR(gpu::CheckRange("num_pages", 0, params.num_pages, 1u << 30));
  CRUMB_RETURN_IF_ERROR(gpu::CheckRange("num_ranges", 0, params.num_ranges, Geometry::kMaxKvHeads));
  CRUMB_RETURN_IF_ERROR(gpu::CheckPointer("pages", params.pages, alignof(void*)));
  CRUMB_RETURN_IF_ERROR(gpu::CheckStride("offset", params.offset));
  CRUMB_RETURN_IF_ERROR(gpu::CheckStride("range_stride", params.range_stride));
  if (params.range_bytes == 0 || params.range_bytes % gpu::kCrcUnitBytes != 0 ||
      params.range_bytes > (size_t{1} << 40)) {
    return absl::InvalidArgumentError(
        absl::StrCat("range_bytes is ", params.range_bytes, "; it must be a multiple of ",
                     gpu::kCrcUnitBytes, ", as head ranges of head_dim 64, 128 and 256 are"));
  }
  return gpu::CheckPointer("checksums", params.checksums, alignof(uint32_t));
}

absl::Status ChecksumPagesReference(const ChecksumPagesParams& params) {
  CRUMB_RETURN_IF_ERROR(ValidateChecksumPages(params));
  for (size_t i = 0; i < size_t{params.num_pages} * params.num_ranges; ++i) {
    const std::byte* image = params.pages[i / params.num_ranges];
    const std::byte* range = image + params.offset + i % params.num_ranges * params.range_stride;
    params.checksums[i] = image == nullptr ? 0 : Crc32c({range, params.range_bytes});
  }
  return absl::OkStatus();
}

}  // namespace crumb
