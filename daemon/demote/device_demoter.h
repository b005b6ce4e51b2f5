// SPDX-License-Identifier: Apache-2.0
//
// Demotion by a device instead of the pool's threads: what WritePage asks of it.
//
// A thread copies staged rows into memory of the device's lane, in the one read that it makes of
// them, and checks the copy as it does for the CPU. Or the device reads the staging memory by
// itself, where it holds that, and compares the checksums of what has arrived. Either way, nothing
// that an engine may still change decides or is kept; and whatever goes wrong there, the CPU
// decides about the page anew.
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
    // The same of rows in memory that Hold holds, instead of Rows: for all heads or none. An engine
    // may change them; `crc32c` is what they must have when they have arrived.
    virtual absl::Status SendHeld(uint32_t index,
                                  std::span<const std::byte> rows,
                                  uint32_t crc32c) = 0;
    // Waits for all heads' two-bit rows, and writes them to `int2`, [kv_head][layer]. `head_crc32c`
    // has the checksums of what was written there, found equal to those of the device. OK: and the
    // same is in the tier, where a place was given. Any error: the CPU is to decide.
    // INVALID_ARGUMENT: rows have NaN or inf. ABORTED: held ones had other checksums than was said.
    // Others are the device's.
    virtual absl::Status Finish(std::span<std::byte> int2, std::span<uint32_t> head_crc32c) = 0;
  };

  struct Work {
    HeadRange heads;                // Of the model; at most MaxHeads.
    bool rows_are_rotated = false;  // Else as the model made them, keys after RoPE.
    // Of the first head in its page's image in the tier; the others follow.
    std::optional<CopyPlace> copy = std::nullopt;
  };

  virtual ~DeviceDemoter() = default;

  // Heads of one page that a lane takes at once; 0: none of this profile, whose geometry or
  // key_ranges the device has no kernel for, so that the CPU demotes it.
  virtual uint32_t MaxHeads(const Profile& profile) const = 0;
  // Has the device read host memory by itself, which it may take milliseconds to prepare for, as
  // long as the result lives: at the longest until the memory is unmapped. Whole pages of the
  // machine, which may be read-only. Null: it does not; rows go by way of lanes then. shared: only
  // to hide what it is.
  virtual std::shared_ptr<const void> Hold(std::span<const std::byte> memory) = 0;
  // Brings a profile to the device, as the first Open of it does otherwise: some 0.4 s of an 8B
  // model's. Blocking.
  virtual void Prepare(const Profile& profile) = 0;
  // May wait for the first use of a profile to be prepared. The profile outlives the lane. Errors
  // are the device's.
  virtual absl::StatusOr<std::unique_ptr<Lane>> Open(const Profile& profile, const Work& work) = 0;
};

}  // namespace crumb
