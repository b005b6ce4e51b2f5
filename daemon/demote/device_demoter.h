// SPDX-License-Identifier: Apache-2.0
//
// Demotion by a device instead of the pool's threads: what WritePage asks of it.
//
// A thread copies staged rows into memory of the device's lane, in the one read that it makes of
// them, and checks the copy as it does for the CPU. So the device reads nothing that an engine can
// change, or take away, and whatever goes wrong there is decided again by the CPU from the very
// same rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "crumb/cuda/profile.h"
#include "daemon/tier/copy_tier.h"
#include "proto/page/head_range.h"

namespace crumb {

// Thread-safe.
class DeviceDemoter {
 public:
  // Heads of one page on their way. Confined to one thread; gone before its demoter is.
  class Lane {
   public:
    virtual ~Lane() = default;

    // The BF16 head range of the `index`th head, all layers: host memory of the lane's own, which
    // is to be filled before Send.
    virtual std::span<std::byte> Rows(uint32_t index) = 0;
    // Starts the way of these rows to the device: each head once, in order. They must stay as they
    // are until Finish returns. Does not wait.
    virtual absl::Status Send(uint32_t index) = 0;
    // Waits for all heads' two-bit rows, and writes them to `int2`, [kv_head][layer]. `head_crc32c`
    // has the checksums of what was written there, found equal to those of the device. OK: and the
    // same is in the tier, where a place was given. Any error: the CPU is to decide, from Rows.
    // INVALID_ARGUMENT: rows have NaN or inf. Others are the device's.
    virtual absl::Status Finish(std::span<std::byte> int2, std::span<uint32_t> head_crc32c) = 0;
  };

  struct Work {
    HeadRange heads;                // Of the model; at most MaxHeads.
    bool rows_are_rotated = false;  // Else as the model made them, keys after RoPE.
    // Of the first head in its page's image in the tier; the others follow.
    std::optional<CopyPlace> copy = std::nullopt;
  };

  virtual ~DeviceDemoter() = default;

  // Heads of one page that a lane takes at once; 0: none of this profile.
  virtual uint32_t MaxHeads(const Profile& profile) const = 0;
  // Brings a profile to the device, as the first Open of it does otherwise: some 0.4 s of an 8B
  // model's. Blocking.
  virtual void Prepare(const Profile& profile) = 0;
  // May wait for the first use of a profile to be prepared. The profile outlives the lane. Errors
  // are the device's.
  virtual absl::StatusOr<std::unique_ptr<Lane>> Open(const Profile& profile, const Work& work) = 0;
};

}  // namespace crumb
