// SPDX-License-Identifier: Apache-2.0
//
// A model profile in device memory, laid out as kernels read it: rotations as operands of the
// tensor cores, feedback factors as the triangle's diagonal blocks and the operands beside them.
//
// Rotation on the tensor cores takes bf16 operands. The rotation matrix has two of them an element,
// its upper and its lower part: rows that stay in BF16 are rotated with both (16 bits), rows that
// are rounded to two bits at once with the upper one (an error of 0.1 % of a row, of which rounding
// to two bits makes more than a hundred times as much).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/statusor.h"

#include "crumb/cuda/profile.h"
#include "proto/page/geometry.h"

namespace crumb {

// What kernels take. Device pointers; alive as long as their DeviceProfile.
struct DeviceHeads {
  uint32_t num_layers = 0;
  uint32_t num_kv_heads = 0;
  uint32_t head_dim = 0;   // Of K and V: 64, 128 or 256.
  bool is_aware = false;   // Keys are rounded with error feedback.
  bool is_tilted = false;  // oscar-int2-tilted: and refitted; queries have a rotation of their own.
  bool has_deviation = false;  // Some head's keys or values are rounded by their deviation.
  // Some head's keys try other ranges than kKeyRanges, which kernels do not take. DemotePages
  // refuses them; all else serves them.
  bool is_demoted_on_cpu = false;
  // [num_layers, num_kv_heads] records, as cuda/launch/head_record.h says.
  const std::byte* records = nullptr;
};

// Whether there are kernels for pages of this geometry. UNIMPLEMENTED: K and V of different
// head_dim, or one that is not 64, 128 or 256.
absl::Status CheckHasKernels(const Geometry& geometry);

// Whether DemotePages makes this head's pages; else they are demoted on the CPU
// (crumb/cuda/demote.h).
inline bool HasDemotionKernel(const HeadParameters& head) {
  return !HasFeedback(head.codec) || head.key_ranges == kKeyRanges;
}
// The same of all heads of a profile.
bool HasDemotionKernels(const Profile& profile);

// Thread-safe. Must outlive the launches that use it.
class DeviceProfile {
 public:
  // Uploads to the current device and waits for it. UNIMPLEMENTED as CheckHasKernels.
  // RESOURCE_EXHAUSTED: no device memory, with the bytes needed.
  // Else as CurrentGpu.
  static absl::StatusOr<std::unique_ptr<DeviceProfile>> Create(const Profile& profile);
  // The same from parts: `heads` is [num_layers, num_kv_heads], all of one codec.
  static absl::StatusOr<std::unique_ptr<DeviceProfile>> Create(
      const Geometry& geometry, std::span<const HeadParameters> heads);
  ~DeviceProfile();  // NOLINT(performance-trivially-destructible): it is so without CUDA only.
  DeviceProfile(const DeviceProfile&) = delete;
  DeviceProfile& operator=(const DeviceProfile&) = delete;

  const DeviceHeads& heads() const { return heads_; }

 private:
  DeviceProfile() = default;

  DeviceHeads heads_;
  std::byte* memory_ = nullptr;
};

}  // namespace crumb
