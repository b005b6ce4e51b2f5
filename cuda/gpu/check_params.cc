// SPDX-License-Identifier: Apache-2.0
#include "cuda/gpu/check_params.h"

#include <cmath>
#include <string>

#include "absl/strings/str_cat.h"

#include "proto/base/status_macros.h"
#include "proto/page/geometry.h"

namespace crumb {

namespace gpu {
namespace {

constexpr size_t kAlignment = 16;

std::string Named(std::string_view name, std::string_view field) {
  return std::string(name) + std::string(field);
}

bool HasKernels(uint32_t head_dim) {
  return head_dim == 64 || head_dim == 128 || head_dim == 256;
}

absl::Status CheckHeadDim(const char* name, uint32_t head_dim) {
  return HasKernels(head_dim)
             ? absl::OkStatus()
             : absl::InvalidArgumentError(absl::StrCat(
                   name, " is ", head_dim,
                   "; the GPU has kernels for 64, 128 and 256: use the CPU's for others"));
}

}  // namespace

absl::Status CheckPointer(std::string_view name, const void* pointer, size_t alignment) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  if (address == 0 || address % alignment != 0) {
    return absl::InvalidArgumentError(absl::StrCat(std::string(name), " is at address ", address,
                                                   "; it must be device memory, aligned to ",
                                                   alignment, " bytes, and not null"));
  }
  return absl::OkStatus();
}

absl::Status CheckStride(std::string_view name, size_t bytes) {
  if (bytes % kAlignment != 0) {
    return absl::InvalidArgumentError(absl::StrCat(std::string(name), " is ", bytes,
                                                   " bytes; it must be a multiple of ", kAlignment,
                                                   ", since rows are read 16 bytes at a time"));
  }
  return absl::OkStatus();
}

absl::Status CheckHeads(const DeviceHeads& heads) {
  CRUMB_RETURN_IF_ERROR(CheckHeadDim("heads.head_dim", heads.head_dim));
  CRUMB_RETURN_IF_ERROR(CheckRange("heads.num_layers", 0, heads.num_layers, Geometry::kMaxLayers));
  CRUMB_RETURN_IF_ERROR(
      CheckRange("heads.num_kv_heads", 0, heads.num_kv_heads, Geometry::kMaxKvHeads));
  return CheckPointer("heads.records", heads.records, kAlignment);
}

absl::Status CheckRange(std::string_view name, uint32_t first, uint32_t count, uint32_t limit) {
  if (count == 0 || first >= limit || count > limit - first) {
    return absl::InvalidArgumentError(absl::StrCat(std::string(name), " is ", count, " from ",
                                                   first, " on; it must be from 1 to ",
                                                   first < limit ? limit - first : 0));
  }
  return absl::OkStatus();
}

absl::Status CheckAttention(const AttentionShape& shape, uint32_t max_group) {
  if (shape.num_kv_heads == 0 || shape.num_kv_heads > Geometry::kMaxKvHeads) {
    return absl::InvalidArgumentError(absl::StrCat(
        "num_kv_heads is ", shape.num_kv_heads, "; it must be from 1 to ", Geometry::kMaxKvHeads));
  }
  const uint32_t group = shape.num_query_heads / shape.num_kv_heads;
  if (group == 0 || group > max_group || shape.num_query_heads % shape.num_kv_heads != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "num_query_heads is ", shape.num_query_heads, "; it must be a multiple of the ",
        shape.num_kv_heads, " KV heads, 1 to ", max_group, " for each"));
  }
  CRUMB_RETURN_IF_ERROR(CheckHeadDim("head_dim", shape.head_dim));
  if (!std::isfinite(shape.scale)) {
    return absl::InvalidArgumentError(
        absl::StrCat("scale is ", shape.scale, "; it must be finite, usually 1 / sqrt(head_dim)"));
  }
  return absl::OkStatus();
}

absl::Status CheckRows(std::string_view name, const DeviceRows& rows) {
  CRUMB_RETURN_IF_ERROR(CheckPointer(Named(name, ".pages"), rows.pages, alignof(void*)));
  CRUMB_RETURN_IF_ERROR(CheckStride(Named(name, ".offset"), rows.offset));
  CRUMB_RETURN_IF_ERROR(CheckStride(Named(name, ".layer_stride"), rows.layer_stride));
  CRUMB_RETURN_IF_ERROR(CheckStride(Named(name, ".head_stride"), rows.head_stride));
  return CheckStride(Named(name, ".token_stride"), rows.token_stride);
}

absl::Status CheckBlocks(std::string_view name,
                         const void* pages,
                         size_t offset,
                         size_t layer_stride,
                         size_t head_stride) {
  CRUMB_RETURN_IF_ERROR(CheckPointer(Named(name, ".pages"), pages, alignof(void*)));
  CRUMB_RETURN_IF_ERROR(CheckStride(Named(name, ".offset"), offset));
  CRUMB_RETURN_IF_ERROR(CheckStride(Named(name, ".layer_stride"), layer_stride));
  return CheckStride(Named(name, ".head_stride"), head_stride);
}

}  // namespace gpu

absl::Status CheckHasKernels(const Geometry& geometry) {
  if (geometry.key_dim == geometry.value_dim && gpu::HasKernels(geometry.key_dim)) {
    return absl::OkStatus();
  }
  return absl::UnimplementedError(
      absl::StrCat("head_dim is ", geometry.key_dim, " of K and ", geometry.value_dim,
                   " of V; the GPU has kernels for 64, 128 and 256, the same for both: use the "
                   "CPU's codec for others"));
}

}  // namespace crumb
