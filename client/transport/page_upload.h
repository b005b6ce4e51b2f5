// SPDX-License-Identifier: Apache-2.0
//
// The pages of a source that lie in host memory, copied to a GPU in order of layers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"

#include "client/transport/page_source.h"
#include "client/transport/upload_plan.h"
#include "crumb/cuda/transfer.h"
#include "crumb/gpu_upload.h"

namespace crumb {

// Thread-compatible.
class PageUpload {
 public:
  // Enqueues all copies to `gpu`. `source` outlives this, and has all bytes. RESOURCE_EXHAUSTED:
  // the device has no memory for the pages, with the bytes. INVALID_ARGUMENT: no layers in a group.
  static absl::StatusOr<std::unique_ptr<PageUpload>> Start(const UploadShape& shape,
                                                           int gpu,
                                                           const GpuUploadOptions& options,
                                                           PageSource* source);
  ~PageUpload();
  PageUpload(const PageUpload&) = delete;
  PageUpload& operator=(const PageUpload&) = delete;

  // As GpuUpload's.
  const std::byte* Page(PageIdx page, PageEncoding encoding) const;
  absl::Status DelayUntilLayer(uint32_t layer, GpuStream stream) const;
  size_t copied_bytes() const { return memory_ == nullptr ? 0 : memory_->bytes(); }
  const absl::Status& registration() const { return registration_; }
  // Of the copies and the source; the lease is for the caller to check.
  absl::Status Validate();

 private:
  PageUpload(const UploadShape& shape, int gpu, const GpuUploadOptions& options, PageSource* source)
      : shape_(shape), gpu_(gpu), options_(options), source_(source) {}

  absl::Status Allocate(size_t bytes);
  absl::Status EnqueueLayers(const UploadPlan& plan);
  absl::Status CheckCopies();

  const UploadShape shape_;
  const int gpu_;
  const GpuUploadOptions options_;
  PageSource* const source_;
  absl::Status registration_;
  std::unique_ptr<OwnGpuStream> stream_;
  std::unique_ptr<OwnGpuMemory> memory_;               // Null: all pages are in place.
  std::vector<std::unique_ptr<OwnGpuEvent>> arrived_;  // Of each group of layers.
  std::vector<UploadPlan::Addresses> pages_;
  std::optional<absl::Status> copies_checked_;  // By the first Validate.
};

}  // namespace crumb
