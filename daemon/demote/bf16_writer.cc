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
  for (uint32_t head = 0; head < num_heads;) {
    const uint32_t count = std::min(num_heads - head, std::max(max_heads, 1u));
    if (is_by_device) {
      DeviceDemoter::Work work{.heads = {owner_.heads.first + head, count},
                               .rows_are_rotated = is_rotated(),
                               .copy = device.copy};
      if (work.copy.has_value()) {
        work.copy->offset += head * int2_bytes_;
      }
      auto lane = device.demoter->Open(owner_.profile, work);
      written.device_error.Update(lane.status());
      is_by_device = lane.ok();
      if (lane.ok()) {
        CRUMB_RETURN_IF_ERROR(WriteByDevice(**lane, head, count, &written.device_error));
        is_by_device = written.device_error.ok();
        head += count;
        continue;
      }
    }
    CRUMB_RETURN_IF_ERROR(WriteHead(head));
    ++head;
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

// Head by head, so that a head's rows are still in the cache when they are demoted.
absl::Status Bf16Writer::WriteHead(uint32_t head) {
  const std::span<std::byte> rows = !is_rotated() ? Sized(scratch_.incoming, bf16_bytes_)
                                    : task_.bf16_block != nullptr
                                        ? Block(head)
                                        : Sized(scratch_.stored, bf16_bytes_);
  CRUMB_RETURN_IF_ERROR(CopyHeadChecked(owner_, staged_, head, staging_, rows));
  std::span<const std::byte> stored;
  CRUMB_RETURN_IF_ERROR(Store(head, rows, &stored));
  return demotes() ? Demote(head, stored) : absl::OkStatus();
}

absl::Status Bf16Writer::WriteByDevice(DeviceDemoter::Lane& lane,
                                       uint32_t first,
                                       uint32_t count,
                                       absl::Status* device_error) {
  absl::Status sent;
  for (uint32_t i = 0; i < count; ++i) {
    const std::span<std::byte> rows = lane.Rows(i);
    CRUMB_RETURN_IF_ERROR(CopyHeadChecked(owner_, staged_, first + i, staging_, rows));
    sent.Update(sent.ok() ? lane.Send(i) : sent);
    if (task_.bf16_block != nullptr) {
      std::span<const std::byte> stored;
      CRUMB_RETURN_IF_ERROR(Store(first + i, rows, &stored));
    }
  }
  const auto checksums = std::span(int2_.head_crc32c).subspan(first, count);
  const absl::Status finished = sent.ok() ? lane.Finish(Codes(first, count), checksums) : sent;
  if (finished.ok()) {
    return absl::OkStatus();
  }
  for (uint32_t i = 0; i < count; ++i) {
    std::span<const std::byte> stored;
    CRUMB_RETURN_IF_ERROR(Store(first + i, lane.Rows(i), &stored));
    CRUMB_RETURN_IF_ERROR(Demote(first + i, stored));
  }
  // Only now: of rows with NaN or inf the status is the rows', and no error of the device's.
  *device_error = finished;
  return absl::OkStatus();
}

absl::Status Bf16Writer::Store(uint32_t head,
                               std::span<const std::byte> rows,
                               std::span<const std::byte>* stored) {
  if (task_.bf16_block == nullptr && is_rotated()) {
    *stored = rows;
    return CheckRows(owner_, staged_, head, rows);
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
