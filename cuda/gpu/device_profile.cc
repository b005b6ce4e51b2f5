// SPDX-License-Identifier: Apache-2.0
#include "crumb/cuda/device_profile.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"

#include "crumb/cuda/device.h"
#include "cuda/gpu/cuda_status.h"
#include "cuda/gpu/pack_head.h"
#include "proto/base/check.h"
#include "proto/base/status_macros.h"

namespace crumb {

absl::StatusOr<std::unique_ptr<DeviceProfile>> DeviceProfile::Create(const Profile& profile) {
  const Geometry& geometry = profile.geometry();
  std::vector<HeadParameters> heads;
  heads.reserve(geometry.NumHeadBlocks());
  for (uint32_t layer = 0; layer < geometry.num_layers; ++layer) {
    for (uint32_t head = 0; head < geometry.num_kv_heads; ++head) {
      heads.push_back(profile.head(layer, head));
    }
  }
  return Create(geometry, heads);
}

absl::StatusOr<std::unique_ptr<DeviceProfile>> DeviceProfile::Create(
    const Geometry& geometry, std::span<const HeadParameters> heads) {
  CRUMB_CHECK(heads.size() == geometry.NumHeadBlocks(), "heads of another geometry");
  const uint32_t dim = geometry.key_dim;
  CRUMB_RETURN_IF_ERROR(CheckHasKernels(geometry));
  CRUMB_RETURN_IF_ERROR(CurrentGpu().status());
  const gpu::HeadRecord layout = gpu::RecordOf(heads[0]);
  std::vector<std::byte> records(heads.size() * layout.bytes());
  for (size_t i = 0; i < heads.size(); ++i) {
    gpu::PackHead(heads[i], std::span(records).subspan(i * layout.bytes(), layout.bytes()));
  }
  std::unique_ptr<DeviceProfile> profile(new DeviceProfile);
  CRUMB_RETURN_IF_ERROR(gpu::CudaStatus(
      cudaMalloc(reinterpret_cast<void**>(&profile->memory_), records.size()),
      absl::StrCat("allocating ", records.size(), " bytes of device memory for a profile")));
  CRUMB_RETURN_IF_ERROR(gpu::CudaStatus(
      cudaMemcpy(profile->memory_, records.data(), records.size(), cudaMemcpyHostToDevice),
      "uploading a profile"));
  profile->heads_ = {.num_layers = geometry.num_layers,
                     .num_kv_heads = geometry.num_kv_heads,
                     .head_dim = dim,
                     .is_aware = layout.is_aware,
                     .is_tilted = layout.is_tilted,
                     .has_deviation = std::ranges::any_of(
                         heads,
                         [](const HeadParameters& head) {
                           return head.codec == CodecId::kOscarInt2Lm || head.values_by_deviation;
                         }),
                     .is_demoted_on_cpu = !std::ranges::all_of(heads, HasDemotionKernel),
                     .records = profile->memory_};
  return profile;
}

DeviceProfile::~DeviceProfile() {
  cudaFree(memory_);
}

}  // namespace crumb
