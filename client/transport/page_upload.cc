// SPDX-License-Identifier: Apache-2.0
#include "client/transport/page_upload.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "client/transport/device_checksums.h"
#include "proto/base/status_macros.h"

namespace crumb {

absl::StatusOr<std::unique_ptr<PageUpload>> PageUpload::Start(const UploadShape& shape,
                                                              int gpu,
                                                              const GpuUploadOptions& options,
                                                              PageSource* source) {
  if (options.layers_per_group == 0) {
    return absl::InvalidArgumentError(
        "GpuUploadOptions::layers_per_group is 0; copy at least one layer at a time");
  }
  std::unique_ptr<PageUpload> upload(new PageUpload(shape, gpu, options, source));
  const ScopedGpu current(gpu);
  CRUMB_RETURN_IF_ERROR(current.status());
  UploadPlan plan(shape, source);
  CRUMB_RETURN_IF_ERROR(upload->Allocate(plan.bytes()));
  if (plan.bytes() > 0) {
    plan.PlaceAt(upload->memory_->data());
    upload->registration_ = source->RegisterWithGpu();
  }
  upload->pages_ = plan.AddressesOfPages();
  CRUMB_RETURN_IF_ERROR(upload->EnqueueLayers(plan));
  return upload;
}

PageUpload::~PageUpload() {
  if (stream_ != nullptr) {
    stream_->Wait().IgnoreError();  // Validate says so, to who asks.
  }
}

absl::Status PageUpload::Allocate(size_t bytes) {
  const auto named = [&](const absl::Status& status) {
    return absl::Status(status.code(), absl::StrCat("copying ", bytes, " bytes of a prefix to GPU ",
                                                    gpu_, ": ", status.message()));
  };
  auto stream = OwnGpuStream::Create();  // Takes memory of the device, too.
  if (!stream.ok()) {
    return named(stream.status());
  }
  stream_ = *std::move(stream);
  if (bytes > 0) {
    auto memory = OwnGpuMemory::Create(bytes);
    if (!memory.ok()) {
      return named(memory.status());
    }
    memory_ = *std::move(memory);
  }
  return absl::OkStatus();
}

absl::Status PageUpload::EnqueueLayers(const UploadPlan& plan) {
  const uint32_t num_layers = shape_.geometry.num_layers;
  for (uint32_t layer = 0; layer < num_layers; layer += options_.layers_per_group) {
    const uint32_t count = std::min(options_.layers_per_group, num_layers - layer);
    for (const GpuRowCopy& copy : plan.CopiesOf(layer, count)) {
      CRUMB_RETURN_IF_ERROR(CopyRowsToGpu(copy, stream_->get()));
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
  const UploadPlan::Addresses& addresses = pages_[page.value()];
  return encoding == PageEncoding::kInt2 ? addresses.int2 : addresses.bf16;
}

absl::Status PageUpload::DelayUntilLayer(uint32_t layer, GpuStream stream) const {
  if (layer >= shape_.geometry.num_layers) {
    return absl::InvalidArgumentError(
        absl::StrCat("layer ", layer, " of ", shape_.geometry.num_layers, "; layers count from 0"));
  }
  const ScopedGpu current(gpu_);
  CRUMB_RETURN_IF_ERROR(current.status());
  CRUMB_RETURN_IF_ERROR(CheckStream(stream));
  return arrived_[layer / options_.layers_per_group]->Delay(stream);
}

// What the source would check on the host, of the copies on the device.
absl::Status PageUpload::CheckCopies() {
  struct Copy {
    PageIdx page;
    PageEncoding encoding;
    std::vector<uint32_t> expected;
  };
  std::vector<Copy> copies;
  std::vector<DeviceImage> images;
  for (const PageEncoding encoding : {PageEncoding::kInt2, PageEncoding::kBf16}) {
    const size_t range_bytes = shape_.geometry.HeadRangeBytes(encoding);
    for (uint32_t p = 0; p < shape_.num_pages; ++p) {
      // Of pages in place, and of those that the source has checked: none.
      std::vector<uint32_t> expected = source_->UncheckedCrc32c(PageIdx(p), encoding);
      if (!expected.empty()) {
        images.push_back(
            {Page(PageIdx(p), encoding) + shape_.heads.first * range_bytes, range_bytes});
        copies.push_back({PageIdx(p), encoding, std::move(expected)});
      }
    }
  }
  const ScopedGpu current(gpu_);
  CRUMB_RETURN_IF_ERROR(current.status());
  const auto found = ChecksumOnDevice(images, shape_.heads.count, *stream_);
  if (absl::IsInvalidArgument(found.status()) || absl::IsUnimplemented(found.status()) ||
      absl::IsResourceExhausted(found.status())) {
    return absl::OkStatus();  // Not a geometry or GPU of the kernel's, or no room: the source
                              // checks.
  }
  CRUMB_RETURN_IF_ERROR(found.status());
  auto next = found->begin();
  for (const Copy& copy : copies) {
    for (const uint32_t expected : copy.expected) {
      if (*next++ != expected) {
        return absl::DataLossError(absl::StrFormat(
            "page %u copied to GPU %d: checksum %08x of a KV head there, %08x expected",
            copy.page.value(), gpu_, *std::prev(next), expected));
      }
    }
  }
  for (const Copy& copy : copies) {
    source_->SetChecked(copy.page, copy.encoding);
  }
  return absl::OkStatus();
}

absl::Status PageUpload::Validate() {
  CRUMB_RETURN_IF_ERROR(stream_->Wait());
  if (!copies_checked_.has_value()) {
    copies_checked_ = CheckCopies();
  }
  const absl::Status of_source = source_->Validate();
  // A page that was given up meanwhile has other bytes, which is no loss of data.
  return of_source.ok() ? *copies_checked_ : of_source;
}

}  // namespace crumb
