// SPDX-License-Identifier: Apache-2.0
#include "client/transport/device_checksums.h"

#include <algorithm>
#include <memory>

#include "crumb/cuda/checksum_pages.h"
#include "proto/base/status_macros.h"

namespace crumb {

absl::StatusOr<std::vector<uint32_t>> ChecksumOnDevice(std::span<const DeviceImage> images,
                                                       uint32_t num_ranges,
                                                       const OwnGpuStream& stream) {
  std::vector<uint32_t> checksums(images.size() * num_ranges);
  if (checksums.empty()) {
    return checksums;
  }
  std::vector<const std::byte*> addresses;
  addresses.reserve(images.size());
  for (const DeviceImage& image : images) {
    addresses.push_back(image.ranges);
  }
  const std::span<const std::byte* const> table(addresses);
  CRUMB_ASSIGN_OR_RETURN(
      const std::unique_ptr<OwnGpuMemory> scratch,
      OwnGpuMemory::Create(table.size_bytes() + checksums.size() * sizeof(uint32_t)));
  auto* const pages = reinterpret_cast<const std::byte**>(scratch->data());
  auto* const results = reinterpret_cast<uint32_t*>(scratch->data() + table.size_bytes());
  CRUMB_RETURN_IF_ERROR(CopyToGpu(scratch->data(), std::as_bytes(table), stream.get()));
  for (size_t first = 0; first < images.size();) {
    const size_t range_bytes = images[first].range_bytes;
    const auto other =
        std::find_if(images.begin() + static_cast<ptrdiff_t>(first), images.end(),
                     [&](const DeviceImage& image) { return image.range_bytes != range_bytes; });
    const auto end = static_cast<size_t>(other - images.begin());
    CRUMB_RETURN_IF_ERROR(ChecksumPages({.num_pages = static_cast<uint32_t>(end - first),
                                         .num_ranges = num_ranges,
                                         .pages = pages + first,
                                         .offset = 0,
                                         .range_stride = range_bytes,
                                         .range_bytes = range_bytes,
                                         .checksums = results + first * num_ranges},
                                        stream.get()));
    first = end;
  }
  CRUMB_RETURN_IF_ERROR(CopyFromGpu(std::as_writable_bytes(std::span(checksums)),
                                    reinterpret_cast<const std::byte*>(results), stream.get()));
  CRUMB_RETURN_IF_ERROR(stream.Wait());
  return checksums;
}

}  // namespace crumb
