// SPDX-License-Identifier: Apache-2.0
//
// One page that came in BF16: its rows are stored where the page's BF16 block waits for them, and
// demoted where its INT2 block does, by a device if one is there and by this thread otherwise.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "daemon/demote/device_demoter.h"
#include "daemon/demote/head_rows.h"
#include "daemon/demote/page_writer.h"

namespace crumb {

// For one page. Thread-compatible; what it is made of outlives it.
class Bf16Writer {
 public:
  Bf16Writer(const PageOwner& owner,
             const PageTask& task,
             std::span<const std::byte> staging,
             DemoteScratch& scratch);

  // As WritePage.
  absl::Status Write(const PageDevice& device, WrittenPage& written);

 private:
  bool demotes() const { return task_.int2_block != nullptr && task_.staged_int2 == nullptr; }
  bool is_rotated() const { return staged_.encoding == StagedEncoding::kBf16; }
  std::span<std::byte> Codes(uint32_t first_head, uint32_t count) const {
    return task_.int2_block->bytes.subspan(first_head * int2_bytes_, count * int2_bytes_);
  }
  std::span<std::byte> Block(uint32_t head) const {
    return task_.bf16_block->bytes.subspan(head * bf16_bytes_, bf16_bytes_);
  }

  // By this thread alone.
  absl::Status WriteHead(uint32_t head);
  // Heads from `first` on, through one lane together; by this thread if that fails. Returns whether
  // it did not. `error` is the device's own, not what was wrong with the rows.
  absl::StatusOr<bool> WriteByDevice(const PageDevice& device,
                                     uint32_t first,
                                     uint32_t count,
                                     absl::Status* error);
  // `sent`: what the lane said to one head's rows.
  absl::Status SendHead(DeviceDemoter::Lane& lane,
                        bool holds_staging,
                        uint32_t head,
                        uint32_t index,
                        absl::Status* sent);
  // Whether rows are finite is checked once: here, or by this thread's demotion of them.
  enum class Check { kHere, kByDemotion };
  // Copies and checks a head's staged rows; `stored` gets them in the form in which they are
  // stored, wherever that is: in the BF16 block, if one waits.
  absl::Status Read(uint32_t head, Check check, std::span<const std::byte>* stored);
  absl::Status Store(uint32_t head,
                     std::span<const std::byte> rows,
                     Check check,
                     std::span<const std::byte>* stored);
  absl::Status Demote(uint32_t head, std::span<const std::byte> stored);

  const PageOwner& owner_;
  const PageTask& task_;
  const StagedPage& staged_;
  const std::span<const std::byte> staging_;
  DemoteScratch& scratch_;
  const size_t bf16_bytes_;  // Of a head.
  const size_t int2_bytes_;
  WrittenBlock int2_;
  WrittenBlock bf16_;
};

}  // namespace crumb
