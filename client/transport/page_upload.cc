// SPDX-License-Identifier: Apache-2.0
#include "client/transport/page_upload.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "proto/base/status_macros.h"

namespace crumb {
namespace {

constexpr PageEncoding kEncodings[] = {PageEncoding::kInt2, PageEncoding::kBf16};

// Where the whole image would begin whose ranges from `first_head` on are at `ranges`.
const std::byte* ImageAt(const std::byte* ranges, uint32_t first_head, size_t range_bytes) {
  // By numbers: the heads before it are not there, so no pointer may be there either.
  return reinterpret_cast<const std::byte*>(  // NOLINT(performance-no-int-to-ptr)
      reinterpret_cast<uintptr_t>(ranges) - first_head * range_bytes);
}

}  // namespace

absl::StatusOr<std::unique_ptr<PageUpload>> PageUpload::Start(const Shape& shape,
                                                              const GpuUploadOptions& options,
                                                              PageSource* source) {
  if (options.layers_per_group == 0) {
    return absl::InvalidArgumentError(
        "GpuUploadOptions::layers_per_group is 0; copy at least one layer at a time");
  }
  std::unique_ptr<PageUpload> upload(new PageUpload(shape, options, source));
  const ScopedGpu current(shape.gpu);
  CRUMB_RETURN_IF_ERROR(current.status());
  CRUMB_ASSIGN_OR_RETURN(upload->stream_, OwnGpuStream::Create());
  CRUMB_RETURN_IF_ERROR(upload->Allocate());
  upload->Place();
  if (upload->memory_ != nullptr) {
    upload->registration_ = source->RegisterWithGpu();
  }
  CRUMB_RETURN_IF_ERROR(upload->EnqueueLayers());
  return upload;
}

PageUpload::~PageUpload() {
  if (stream_ != nullptr) {
    stream_->Wait().IgnoreError();  // Validate says so, to who asks.
  }
}

absl::Status PageUpload::Allocate() {
  size_t bytes = 0;
  for (uint32_t page = 0; page < shape_.num_pages; ++page) {
    for (const PageEncoding encoding : kEncodings) {
      bytes += HostRanges(PageIdx(page), encoding) != nullptr
                   ? shape_.heads.count * RangeBytes(encoding)
                   : 0;
    }
  }
  if (bytes == 0) {
    return absl::OkStatus();
  }
  auto memory = OwnGpuMemory::Create(bytes);
  if (!memory.ok()) {
    return absl::Status(memory.status().code(),
                        absl::StrCat("copying ", bytes, " bytes of a prefix to GPU ", shape_.gpu,
                                     ": ", memory.status().message()));
  }
  memory_ = *std::move(memory);
  return absl::OkStatus();
}

void PageUpload::PlacePage(PageIdx page, PageEncoding encoding, std::byte** next) {
  const size_t range_bytes = RangeBytes(encoding);
  const std::byte*& address =
      encoding == PageEncoding::kInt2 ? pages_[page.value()].int2 : pages_[page.value()].bf16;
  const std::byte* const ranges = HostRanges(page, encoding);
  if (ranges == nullptr) {
    address = source_->GpuPage(page, encoding);
    return;
  }
  address = ImageAt(*next, shape_.heads.first, range_bytes);
  if (!runs_.empty() && runs_.back().encoding == encoding &&
      runs_.back().source + runs_.back().num_ranges * range_bytes == ranges &&
      runs_.back().target + runs_.back().num_ranges * range_bytes == *next) {
    runs_.back().num_ranges += shape_.heads.count;
  } else {
    runs_.push_back({encoding, ranges, *next, shape_.heads.count});
  }
  *next += shape_.heads.count * range_bytes;
}

// Page after page, all INT2 first: pages of a prefix mostly follow each other in a chunk, and make
// one run then.
void PageUpload::Place() {
  pages_.resize(shape_.num_pages);
  std::byte* next = memory_ == nullptr ? nullptr : memory_->data();
  for (const PageEncoding encoding : kEncodings) {
    for (uint32_t page = 0; page < shape_.num_pages; ++page) {
      PlacePage(PageIdx(page), encoding, &next);
    }
  }
}

absl::Status PageUpload::EnqueueLayers() {
  const uint32_t num_layers = shape_.geometry.num_layers;
  for (uint32_t layer = 0; layer < num_layers; layer += options_.layers_per_group) {
    const uint32_t count = std::min(options_.layers_per_group, num_layers - layer);
    for (const Run& run : runs_) {
      const size_t block_bytes = shape_.geometry.HeadBlockBytes(run.encoding);
      const size_t range_bytes = RangeBytes(run.encoding);
      CRUMB_RETURN_IF_ERROR(CopyRowsToGpu({.target = run.target + layer * block_bytes,
                                           .target_stride = range_bytes,
                                           .source = run.source + layer * block_bytes,
                                           .source_stride = range_bytes,
                                           .row_bytes = count * block_bytes,
                                           .rows = run.num_ranges},
                                          stream_->get()));
    }
    CRUMB_ASSIGN_OR_RETURN(std::unique_ptr<OwnGpuEvent> arrived, OwnGpuEvent::Create());
    CRUMB_RETURN_IF_ERROR(arrived->Record(stream_->get()));
    arrived_.push_back(std::move(arrived));
  }
  return absl::OkStatus();
}

const std::byte* PageUpload::Page(PageIdx page, PageEncoding encoding) const {
  if (page.value() >= shape_.num_pages) {
    return nullptr;
  }
  const Addresses& addresses = pages_[page.value()];
  return encoding == PageEncoding::kInt2 ? addresses.int2 : addresses.bf16;
}

absl::Status PageUpload::DelayUntilLayer(uint32_t layer, GpuStream stream) const {
  if (layer >= shape_.geometry.num_layers) {
    return absl::InvalidArgumentError(
        absl::StrCat("layer ", layer, " of ", shape_.geometry.num_layers, "; layers count from 0"));
  }
  return arrived_[layer / options_.layers_per_group]->Delay(stream);
}

absl::Status PageUpload::Validate() {
  CRUMB_RETURN_IF_ERROR(stream_->Wait());
  return source_->Validate();
}

}  // namespace crumb
