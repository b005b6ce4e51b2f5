// SPDX-License-Identifier: Apache-2.0
//
// The pages of a source that lie in host memory, copied to a GPU in order of layers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"

#include "client/transport/page_source.h"
#include "crumb/cuda/transfer.h"
#include "crumb/gpu_upload.h"
#include "proto/page/geometry.h"

namespace crumb {

// Thread-compatible.
class PageUpload : public GpuUpload {
 public:
  struct Shape {
    Geometry geometry;
    HeadRange heads;  // Of the rank; count is not 0.
    uint32_t num_pages = 0;
    int gpu = 0;
  };

  // Enqueues all copies. `source` outlives this. RESOURCE_EXHAUSTED: the device has no memory for
  // the pages, with the bytes. INVALID_ARGUMENT: no layers in a group.
  static absl::StatusOr<std::unique_ptr<PageUpload>> Start(const Shape& shape,
                                                           const GpuUploadOptions& options,
                                                           PageSource* source);
  ~PageUpload() override;
  PageUpload(const PageUpload&) = delete;
  PageUpload& operator=(const PageUpload&) = delete;

  const std::byte* Page(PageIdx page, PageEncoding encoding) const override;
  absl::Status DelayUntilLayer(uint32_t layer, GpuStream stream) const override;
  size_t copied_bytes() const override { return memory_ == nullptr ? 0 : memory_->bytes(); }
  const absl::Status& registration() const override { return registration_; }
  // Of the copies and the source; the lease is for the caller to check.
  absl::Status Validate() override;

 private:
  // Head ranges that follow each other with one stride, here and there.
  struct Run {
    PageEncoding encoding = PageEncoding::kInt2;
    const std::byte* source = nullptr;  // Of the first range.
    std::byte* target = nullptr;
    size_t num_ranges = 0;
  };
  struct Addresses {
    const std::byte* int2 = nullptr;
    const std::byte* bf16 = nullptr;
  };

  PageUpload(const Shape& shape, const GpuUploadOptions& options, PageSource* source)
      : shape_(shape), options_(options), source_(source) {}

  absl::Status Allocate();
  void Place();
  void PlacePage(PageIdx page, PageEncoding encoding, std::byte** next);
  absl::Status EnqueueLayers();
  const std::byte* HostRanges(PageIdx page, PageEncoding encoding) const {
    return source_->HeadBlock(page, encoding, 0, shape_.heads.first);
  }
  size_t RangeBytes(PageEncoding encoding) const {
    return shape_.geometry.HeadRangeBytes(encoding);
  }

  const Shape shape_;
  const GpuUploadOptions options_;
  PageSource* const source_;
  absl::Status registration_;
  std::unique_ptr<OwnGpuStream> stream_;
  std::unique_ptr<OwnGpuMemory> memory_;               // Null: all pages are in place.
  std::vector<std::unique_ptr<OwnGpuEvent>> arrived_;  // Of each group of layers.
  std::vector<Run> runs_;
  std::vector<Addresses> pages_;
};

}  // namespace crumb
