// SPDX-License-Identifier: Apache-2.0
//
// Demotion on the GPU that the tier of copies is on: rows go up by the bus, two-bit rows come back
// for the host arena, and are made in their place in the tier where there is one.
//
// All of its memory is taken when it is made, some 40 MiB a lane, half of it the device's; a lane
// is a stream of its own, so pages of several threads overlap on the bus and on the device. Model
// profiles are brought to the device at their first use and kept there, the last kMaxProfiles.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"

#include "crumb/cuda/device_profile.h"
#include "daemon/demote/device_demoter.h"
#include "daemon/tier/gpu_tier.h"
#include "proto/base/ids.h"

namespace crumb {

class GpuDemoter : public DeviceDemoter {
 public:
  static constexpr size_t kMaxProfiles = 4;  // An 8B model's has some 60 MB.
  // Of staging memory that the device reads by itself, and that is locked therefore.
  static constexpr size_t kMaxHeldBytes = size_t{4} << 30;

  // `tier` outlives this. As many lanes as threads may ask for at once. RESOURCE_EXHAUSTED: the
  // device, or the host, has no memory for them.
  static absl::StatusOr<std::unique_ptr<GpuDemoter>> Create(const GpuTier& tier,
                                                            uint32_t num_lanes);
  ~GpuDemoter() override;
  GpuDemoter(const GpuDemoter&) = delete;
  GpuDemoter& operator=(const GpuDemoter&) = delete;

  uint32_t MaxHeads(const Profile& profile) const override;
  std::shared_ptr<const void> Hold(std::span<const std::byte> memory) override;
  void Prepare(const Profile& profile) override;
  // RESOURCE_EXHAUSTED also: all lanes are taken.
  absl::StatusOr<std::unique_ptr<Lane>> Open(const Profile& profile, const Work& work) override;

 private:
  class GpuLane;
  struct Held;
  struct Buffers;
  struct Prepared;

  explicit GpuDemoter(const GpuTier& tier);
  absl::StatusOr<std::unique_ptr<Buffers>> MakeBuffers() const;
  std::unique_ptr<Buffers> TakeBuffers() ABSL_LOCKS_EXCLUDED(mutex_);
  void GiveBack(std::unique_ptr<Buffers> buffers) ABSL_LOCKS_EXCLUDED(mutex_);
  // shared: with the lanes that use it, while newer profiles take its place here.
  absl::StatusOr<std::shared_ptr<const DeviceProfile>> OnDevice(const Profile& profile)
      ABSL_LOCKS_EXCLUDED(mutex_);
  void MakeRoomLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const GpuTier& tier_;
  const std::shared_ptr<std::atomic<size_t>> held_bytes_;  // shared: holds may outlive this.
  absl::Mutex mutex_;
  std::vector<std::unique_ptr<Buffers>> free_ ABSL_GUARDED_BY(mutex_);
  // shared: with those who wait for it to be prepared.
  absl::flat_hash_map<ProfileId, std::shared_ptr<Prepared>> profiles_ ABSL_GUARDED_BY(mutex_);
  uint64_t uses_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace crumb
