// SPDX-License-Identifier: Apache-2.0
//
// What the ops answer in a build without CUDA.
#include "crumb/cuda/append_rows.h"
#include "crumb/cuda/checksum_pages.h"
#include "crumb/cuda/demote_pages.h"
#include "crumb/cuda/device.h"
#include "crumb/cuda/device_profile.h"
#include "crumb/cuda/expand_pages.h"
#include "crumb/cuda/prefill_attention.h"
#include "crumb/cuda/shared_decode.h"
#include "crumb/cuda/shared_memory.h"
#include "crumb/cuda/split_decode.h"
#include "crumb/cuda/transfer.h"
#include "proto/base/status_macros.h"

namespace crumb {
namespace {

absl::Status NoCuda() {
  return absl::UnimplementedError(
      "this build has no CUDA; configure with nvcc in the PATH and -D CRUMB_CUDA=ON");
}

}  // namespace

absl::StatusOr<GpuDevice> CurrentGpu() {
  return NoCuda();
}

absl::Status CheckStream(GpuStream /*stream*/) {
  return NoCuda();
}

absl::StatusOr<size_t> SplitDecodeWorkspaceBytes(const SplitDecodeParams& /*params*/) {
  return NoCuda();
}

absl::Status SplitDecode(const SplitDecodeParams& params, GpuStream /*stream*/) {
  CRUMB_RETURN_IF_ERROR(ValidateSplitDecode(params));
  return NoCuda();
}

absl::Status TakeSplitDecodeProblem(const SplitDecodeParams& /*params*/, GpuStream /*stream*/) {
  return NoCuda();
}

absl::StatusOr<std::unique_ptr<DeviceProfile>> DeviceProfile::Create(const Profile& /*profile*/) {
  return NoCuda();
}

absl::StatusOr<std::unique_ptr<DeviceProfile>> DeviceProfile::Create(
    const Geometry& /*geometry*/, std::span<const HeadParameters> /*heads*/) {
  return NoCuda();
}

DeviceProfile::~DeviceProfile() = default;

absl::Status DemotePages(const DemotePagesParams& params, GpuStream /*stream*/) {
  CRUMB_RETURN_IF_ERROR(ValidateDemotePages(params));
  return NoCuda();
}

absl::Status TakeDemotePagesProblem(const DemotePagesParams& /*params*/, GpuStream /*stream*/) {
  return NoCuda();
}

absl::StatusOr<size_t> SharedDecodeWorkspaceBytes(const SharedDecodeParams& /*params*/) {
  return NoCuda();
}

absl::Status SharedDecode(const SharedDecodeParams& params, GpuStream /*stream*/) {
  CRUMB_RETURN_IF_ERROR(ValidateSharedDecode(params));
  return NoCuda();
}

absl::Status ExpandPages(const ExpandPagesParams& params, GpuStream /*stream*/) {
  CRUMB_RETURN_IF_ERROR(ValidateExpandPages(params));
  return NoCuda();
}

absl::Status TakeExpandPagesProblem(const ExpandPagesParams& /*params*/, GpuStream /*stream*/) {
  return NoCuda();
}

absl::Status AppendRows(const AppendRowsParams& params, GpuStream /*stream*/) {
  CRUMB_RETURN_IF_ERROR(ValidateAppendRows(params));
  return NoCuda();
}

absl::Status TakeAppendRowsProblem(const AppendRowsParams& /*params*/, GpuStream /*stream*/) {
  return NoCuda();
}

absl::Status ChecksumPages(const ChecksumPagesParams& params, GpuStream /*stream*/) {
  CRUMB_RETURN_IF_ERROR(ValidateChecksumPages(params));
  return NoCuda();
}

absl::Status PrefillAttention(const PrefillAttentionParams& params, GpuStream /*stream*/) {
  CRUMB_RETURN_IF_ERROR(ValidatePrefillAttention(params));
  return NoCuda();
}

absl::Status TakePrefillAttentionProblem(const PrefillAttentionParams& /*params*/,
                                         GpuStream /*stream*/) {
  return NoCuda();
}

absl::StatusOr<GpuUuid> GetGpuUuid(int /*device*/) {
  return NoCuda();
}

absl::StatusOr<std::unique_ptr<SharedGpuMemory>> SharedGpuMemory::Create(int /*device*/,
                                                                         size_t /*bytes*/) {
  return NoCuda();
}

absl::StatusOr<std::unique_ptr<SharedGpuMemory>> SharedGpuMemory::Open(int /*device*/,
                                                                       int /*fd*/,
                                                                       size_t /*bytes*/) {
  return NoCuda();
}

SharedGpuMemory::~SharedGpuMemory() = default;

ScopedGpu::ScopedGpu(int /*device*/) : status_(NoCuda()) {}
ScopedGpu::~ScopedGpu() = default;

// Nothing of these is ever made. Their destructors are not defaulted, since clang-tidy would then
// have them defaulted in the class, where those of a build with CUDA do something.
absl::StatusOr<std::unique_ptr<OwnGpuStream>> OwnGpuStream::Create() {
  return NoCuda();
}
OwnGpuStream::~OwnGpuStream() {}
absl::Status OwnGpuStream::Wait() const {
  return NoCuda();
}

absl::StatusOr<std::unique_ptr<OwnGpuEvent>> OwnGpuEvent::Create() {
  return NoCuda();
}
OwnGpuEvent::~OwnGpuEvent() {}
absl::Status OwnGpuEvent::Record(GpuStream /*stream*/) {
  return NoCuda();
}
absl::Status OwnGpuEvent::Delay(GpuStream /*stream*/) const {
  return NoCuda();
}
absl::Status OwnGpuEvent::Wait() const {
  return NoCuda();
}

absl::StatusOr<std::unique_ptr<OwnGpuMemory>> OwnGpuMemory::Create(size_t /*bytes*/) {
  return NoCuda();
}
OwnGpuMemory::~OwnGpuMemory() {}

absl::StatusOr<std::unique_ptr<OwnPinnedMemory>> OwnPinnedMemory::Create(size_t /*bytes*/) {
  return NoCuda();
}
OwnPinnedMemory::~OwnPinnedMemory() {}

absl::StatusOr<std::unique_ptr<HostRegistration>> HostRegistration::Create(
    std::span<const std::byte> /*memory*/, bool /*is_read_only*/) {
  return NoCuda();
}
HostRegistration::~HostRegistration() {}

absl::Status CheckIsGpuMemory(const std::byte* /*data*/, size_t /*bytes*/) {
  return NoCuda();
}

absl::Status CopyToGpu(std::byte* /*target*/,
                       std::span<const std::byte> /*source*/,
                       GpuStream /*stream*/) {
  return NoCuda();
}

absl::Status CopyFromGpu(std::span<std::byte> /*target*/,
                         const std::byte* /*source*/,
                         GpuStream /*stream*/) {
  return NoCuda();
}

absl::Status ClearGpu(std::byte* /*target*/, size_t /*bytes*/, GpuStream /*stream*/) {
  return NoCuda();
}

absl::Status CopyRowsToGpu(const GpuRowCopy& /*copy*/, GpuStream /*stream*/) {
  return NoCuda();
}

}  // namespace crumb
