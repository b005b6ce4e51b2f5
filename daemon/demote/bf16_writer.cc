// SPDX-License-Identifier: Apache-2.0
#include "daemon/demote/bf16_writer.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "proto/base/crc32c.h"
#include "proto/base/status_macros.h"

namespace crumb {
namespace {

std::span<std::byte> Sized(std::vector<std::byte>& buffer, size_t bytes) {
  buffer.resize(std::max(buffer.size(), bytes));
  return std::span(buffer).first(bytes);
}

}  // namespace

Bf16Writer::Bf16Writer(const PageOwner& owner,
                       const PageTask& task,
                       std::span<const std::byte> staging,
                       DemoteScratch& scratch)
    : owner_(owner),
      task_(task),
      staged_(*task.staged_bf16),
      staging_(staging),
      scratch_(scratch),
      bf16_bytes_(HeadBytes(owner, PageEncoding::kBf16)),
      int2_bytes_(HeadBytes(owner, PageEncoding::kInt2)),
      int2_{staged_.page, PageEncoding::kInt2, std::vector<uint32_t>(owner.heads.count)},
      bf16_{staged_.page, PageEncoding::kBf16, std::vector<uint32_t>(owner.heads.count)} {}

absl::Status Bf16Writer::Write(const PageDevice& device, WrittenPage& written) {
  const uint32_t num_heads = owner_.heads.count;
  const uint32_t max_heads =
      demotes() && device.demoter != nullptr ? device.demoter->MaxHeads(owner_.profile) : 0;
  bool is_by_device = max_heads > 0;
  uint32_t head = 0;
  while (is_by_device && head < num_heads) {
    const uint32_t count = std::min(num_heads - head, max_heads);
    CRUMB_ASSIGN_OR_RETURN(is_by_device, WriteByDevice(device, head, count, &written.device_error));
    head += count;
  }
  for (; head < num_heads; ++head) {
    CRUMB_RETURN_IF_ERROR(WriteHead(head));
  }
  if (demotes()) {
    written.demoted_by = is_by_device ? DemotedBy::kDevice : DemotedBy::kCpu;
    int2_.is_copied = is_by_device && device.copy.has_value();
    written.blocks.push_back(std::move(int2_));
  }
  if (task_.bf16_block != nullptr) {
    written.blocks.push_back(std::move(bf16_));
  }
  return absl::OkStatus();
}

absl::Status Bf16Writer::Read(uint32_t head, Check check, std::span<const std::byte>* stored) {
  const std::span<std::byte> rows = !is_rotated() ? Sized(scratch_.incoming, bf16_bytes_)
                                    : task_.bf16_block != nullptr
                                        ? Block(head)
                                        : Sized(scratch_.stored, bf16_bytes_);
  CRUMB_RETURN_IF_ERROR(CopyHeadChecked(owner_, staged_, head, staging_, rows));
  return Store(head, rows, check, stored);
}

// Head by head, so that a head's rows are still in the cache when they are demoted.
absl::Status Bf16Writer::WriteHead(uint32_t head) {
  std::span<const std::byte> stored;
  CRUMB_RETURN_IF_ERROR(Read(head, demotes() ? Check::kByDemotion : Check::kHere, &stored));
  return demotes() ? Demote(head, stored) : absl::OkStatus();
}

absl::Status Bf16Writer::SendHead(DeviceDemoter::Lane& lane,
                                  bool holds_staging,
                                  uint32_t head,
                                  uint32_t index,
                                  absl::Status* sent) {
  std::span<const std::byte> stored;
  if (holds_staging) {
    const auto rows = staging_.subspan(staged_.offset + head * bf16_bytes_, bf16_bytes_);
    *sent = lane.SendHeld(index, rows, staged_.head_crc32c[head]);
    return task_.bf16_block != nullptr ? Read(head, Check::kHere, &stored) : absl::OkStatus();
  }
  const std::span<std::byte> rows = lane.Rows(index);
  CRUMB_RETURN_IF_ERROR(CopyHeadChecked(owner_, staged_, head, staging_, rows));
  *sent = lane.Send(index);
  return task_.bf16_block != nullptr ? Store(head, rows, Check::kHere, &stored) : absl::OkStatus();
}

absl::StatusOr<bool> Bf16Writer::WriteByDevice(const PageDevice& device,
                                               uint32_t first,
                                               uint32_t count,
                                               absl::Status* error) {
  DeviceDemoter::Work work{.heads = {owner_.heads.first + first, count},
                           .rows_are_rotated = is_rotated(),
                           .copy = device.copy};
  if (work.copy.has_value()) {
    work.copy->offset += first * int2_bytes_;
  }
  const auto lane = device.demoter->Open(owner_.profile, work);
  absl::Status done = lane.status();
  for (uint32_t i = 0; i < count && done.ok(); ++i) {
    CRUMB_RETURN_IF_ERROR(SendHead(**lane, device.holds_staging, first + i, i, &done));
  }
  if (done.ok()) {
    done = (*lane)->Finish(Codes(first, count), std::span(int2_.head_crc32c).subspan(first, count));
  }
  if (done.ok()) {
    return true;
  }
  for (uint32_t i = 0; i < count; ++i) {
    CRUMB_RETURN_IF_ERROR(WriteHead(first + i));
  }
  // An engine may change rows after the device has read them by itself, and before we do.
  const bool are_the_rows =
      device.holds_staging && (absl::IsAborted(done) || absl::IsInvalidArgument(done));
  error->Update(are_the_rows ? absl::OkStatus() : done);
  return false;
}

absl::Status Bf16Writer::Store(uint32_t head,
                               std::span<const std::byte> rows,
                               Check check,
                               std::span<const std::byte>* stored) {
  if (is_rotated() && check == Check::kHere) {
    CRUMB_RETURN_IF_ERROR(CheckRows(owner_, staged_, head, rows));
  }
  if (task_.bf16_block == nullptr && is_rotated()) {
    *stored = rows;
    return absl::OkStatus();
  }
  const std::span<std::byte> target =
      task_.bf16_block != nullptr ? Block(head) : Sized(scratch_.stored, bf16_bytes_);
  *stored = target;
  CRUMB_RETURN_IF_ERROR(StoreRows(owner_, staged_, head, rows, target));
  if (task_.bf16_block != nullptr) {
    // Of bytes that came as they are stored, the checksum that the copy was compared with.
    bf16_.head_crc32c[head] = is_rotated() ? staged_.head_crc32c[head] : Crc32c(target);
  }
  return absl::OkStatus();
}

absl::Status Bf16Writer::Demote(uint32_t head, std::span<const std::byte> stored) {
  return DemoteHead(owner_, staged_, head, stored, Codes(head, 1), int2_.head_crc32c[head]);
}

}  // namespace crumb
