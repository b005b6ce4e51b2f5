// SPDX-License-Identifier: Apache-2.0
#include "daemon/tier/gpu_tier.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "crumb/cuda/checksum_pages.h"
#include "crumb/cuda/device_profile.h"
#include "proto/base/check.h"
#include "proto/base/status_macros.h"

namespace crumb {
namespace {

constexpr size_t kUnitBytes = size_t{2} << 20;  // Of cuMemCreate on every GPU so far.
constexpr size_t kMaxCopies = 64;               // Checked in one go.
constexpr size_t kChecksumsOffset = kMaxCopies * sizeof(void*);
constexpr size_t kScratchBytes =
    kChecksumsOffset + kMaxCopies * Geometry::kMaxKvHeads * sizeof(uint32_t);

// How many of the copies, from the first on, are of one shape.
size_t SameShape(std::span<const PageCopy> copies) {
  const auto differs = [&](const PageCopy& copy) {
    return copy.source.size() != copies[0].source.size() ||
           copy.head_crc32c.size() != copies[0].head_crc32c.size();
  };
  return static_cast<size_t>(std::find_if(copies.begin(), copies.end(), differs) - copies.begin());
}

absl::Status Compare(const PageCopy& copy, std::span<const uint32_t> arrived) {
  for (size_t i = 0; i < arrived.size(); ++i) {
    if (arrived[i] != copy.head_crc32c[i]) {
      return absl::DataLossError(absl::StrFormat(
          "copy to segment %u of the GPU's memory at offset %u: range %u has checksum %08x there, "
          "%08x in the host's; the page is not given to readers on the GPU",
          copy.place.segment, copy.place.offset, i, arrived[i], copy.head_crc32c[i]));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<GpuTier>> GpuTier::Create(const Options& options) {
  std::unique_ptr<GpuTier> tier(new GpuTier);
  tier->device_ = options.device;
  tier->segment_bytes_ = (options.segment_bytes + kUnitBytes - 1) / kUnitBytes * kUnitBytes;
  const size_t num_segments = options.capacity_bytes / std::max(tier->segment_bytes_, kUnitBytes);
  if (num_segments == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("gpu_arena is ", options.capacity_bytes, " bytes, less than one gpu_chunk of ",
                     tier->segment_bytes_, ": raise it, or lower gpu_chunk"));
  }
  const ScopedGpu current(options.device);
  CRUMB_RETURN_IF_ERROR(current.status());
  CRUMB_ASSIGN_OR_RETURN(const GpuDevice device, CurrentGpu());
  tier->name_ = device.name;
  CRUMB_ASSIGN_OR_RETURN(tier->uuid_, GetGpuUuid(options.device));
  CRUMB_ASSIGN_OR_RETURN(tier->stream_, OwnGpuStream::Create());
  CRUMB_ASSIGN_OR_RETURN(tier->scratch_, OwnGpuMemory::Create(kScratchBytes));
  for (size_t i = 0; i < num_segments; ++i) {
    auto segment = SharedGpuMemory::Create(options.device, tier->segment_bytes_);
    if (!segment.ok()) {
      return absl::Status(segment.status().code(),
                          absl::StrCat("segment ", i, " of ", num_segments,
                                       " of gpu_arena: ", segment.status().message()));
    }
    tier->segments_.push_back(*std::move(segment));
  }
  return tier;
}

std::string GpuTier::Description() const {
  return absl::StrCat("GPU ", device_, " (", name_, "): ", segments_.size(), " chunks of ",
                      segment_bytes_, " bytes, mapped by engines on the same GPU");
}

absl::Status GpuTier::CheckGeometry(const Geometry& geometry) const {
  return CheckHasKernels(geometry);
}

absl::StatusOr<UniqueFd> GpuTier::Share(uint32_t segment) const {
  CRUMB_CHECK(segments_[segment] != nullptr, "a segment without memory is in use");
  UniqueFd copy(::fcntl(segments_[segment]->fd(), F_DUPFD_CLOEXEC, 0));
  if (!copy.is_valid()) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "duplicating the descriptor of a GPU's memory: ", std::generic_category().message(errno),
        "; raise the limit of open files (LimitNOFILE, ulimit -n), or gpu_chunk"));
  }
  return copy;
}

// shared: only to hide what it is.
std::shared_ptr<const void> GpuTier::Hold(std::span<const std::byte> memory) const {
  const ScopedGpu current(device_);
  if (!current.status().ok()) {
    return nullptr;
  }
  auto registration = HostRegistration::Create(memory, /*is_read_only=*/true);
  if (!registration.ok()) {
    return nullptr;
  }
  // Given up on the same device, by whoever is the last to let go.
  return {registration->release(), [device = device_](const HostRegistration* held) {
            const ScopedGpu on_device(device);
            delete held;
          }};
}

absl::Status GpuTier::Renew(uint32_t segment) {
  segments_[segment] = nullptr;  // First: the device may have no memory for both.
  CRUMB_ASSIGN_OR_RETURN(segments_[segment], SharedGpuMemory::Create(device_, segment_bytes_));
  return absl::OkStatus();
}

absl::Status GpuTier::WriteSome(std::span<const PageCopy> copies,
                                std::vector<uint32_t>* checksums) {
  std::vector<std::byte*> targets;
  for (const PageCopy& copy : copies) {
    CRUMB_CHECK(copy.place.offset + copy.source.size() <= segment_bytes_,
                "copy beyond its segment");
    targets.push_back(Address(copy.place));
  }
  absl::Status status = EnqueueCopies(copies, targets, checksums);
  // Also what was enqueued before an error: the store gives places and pages to others then.
  status.Update(stream_->Wait());
  return status;
}

absl::Status GpuTier::EnqueueCopies(std::span<const PageCopy> copies,
                                    std::span<std::byte* const> targets,
                                    std::vector<uint32_t>* checksums) {
  for (size_t i = 0; i < copies.size(); ++i) {
    CRUMB_RETURN_IF_ERROR(CopyToGpu(targets[i], copies[i].source, stream_->get()));
  }
  CRUMB_RETURN_IF_ERROR(CopyToGpu(scratch_->data(), std::as_bytes(targets), stream_->get()));
  auto* const results = reinterpret_cast<uint32_t*>(scratch_->data() + kChecksumsOffset);
  checksums->clear();
  for (size_t i = 0; i < copies.size();) {
    const size_t count = SameShape(copies.subspan(i));
    const size_t num_ranges = copies[i].head_crc32c.size();
    const size_t range_bytes = copies[i].source.size() / num_ranges;
    CRUMB_RETURN_IF_ERROR(
        ChecksumPages({.num_pages = static_cast<uint32_t>(count),
                       .num_ranges = static_cast<uint32_t>(num_ranges),
                       .pages = reinterpret_cast<const std::byte* const*>(scratch_->data()) + i,
                       .offset = 0,
                       .range_stride = range_bytes,
                       .range_bytes = range_bytes,
                       .checksums = results + checksums->size()},
                      stream_->get()));
    checksums->resize(checksums->size() + count * num_ranges);
    i += count;
  }
  return CopyFromGpu(std::as_writable_bytes(std::span(*checksums)),
                     scratch_->data() + kChecksumsOffset, stream_->get());
}

std::vector<absl::Status> GpuTier::Write(std::span<const PageCopy> copies) {
  std::vector<absl::Status> statuses;
  std::vector<uint32_t> checksums;
  const ScopedGpu current(device_);
  absl::MutexLock lock(&mutex_);
  for (size_t i = 0; i < copies.size(); i += kMaxCopies) {
    const auto some = copies.subspan(i, std::min(kMaxCopies, copies.size() - i));
    const absl::Status status =
        current.status().ok() ? WriteSome(some, &checksums) : current.status();
    size_t next = 0;
    for (const PageCopy& copy : some) {
      const size_t num_ranges = copy.head_crc32c.size();
      statuses.push_back(status.ok() ? Compare(copy, std::span(checksums).subspan(next, num_ranges))
                                     : status);
      next += num_ranges;
    }
  }
  return statuses;
}

}  // namespace crumb
