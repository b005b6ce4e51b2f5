// SPDX-License-Identifier: Apache-2.0
#include "client/session/page_exporter.h"

#include <utility>

#include "absl/strings/str_cat.h"

#include "client/transport/device_checksums.h"
#include "proto/base/status_macros.h"

namespace crumb {
namespace {

constexpr uintptr_t kImageAlignment = 16;  // ChecksumPagesParams::pages.

}  // namespace

absl::Status SequenceExporter::ExportPage(PageIdx page,
                                          PageEncoding encoding,
                                          std::span<std::byte> image) {
  const size_t num_before = head_crc32c_.size();
  head_crc32c_.resize(num_before + sequence_.heads().count);
  return sequence_.ExportPage(page, encoding, image, std::span(head_crc32c_).subspan(num_before));
}

absl::StatusOr<std::vector<uint32_t>> SequenceExporter::Finish(uint32_t /*num_heads*/) {
  return std::exchange(head_crc32c_, {});
}

absl::StatusOr<std::unique_ptr<GpuExporter>> GpuExporter::Create(const GpuPages& pages) {
  std::unique_ptr<GpuExporter> exporter(new GpuExporter(pages));
  CRUMB_ASSIGN_OR_RETURN(exporter->stream_, OwnGpuStream::Create());
  return exporter;
}

absl::Status GpuExporter::ExportPage(PageIdx page,
                                     PageEncoding encoding,
                                     std::span<std::byte> image) {
  absl::Status status = StartExport(page, encoding, image);
  if (!status.ok()) {
    stream_->Wait().IgnoreError();  // The images before this one are their owner's again.
  }
  return status;
}

absl::Status GpuExporter::StartExport(PageIdx page,
                                      PageEncoding encoding,
                                      std::span<std::byte> image) {
  const std::byte* const source = pages_.Page(page, encoding);
  if (source == nullptr) {
    return absl::NotFoundError(absl::StrCat("page ", page.value(),
                                            " is not held on the GPU any more; it must stay until "
                                            "the publish returns"));
  }
  // A kernel that read it otherwise would end all work of the process on the device.
  if (reinterpret_cast<uintptr_t>(source) % kImageAlignment != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("page ", page.value(), ": address ", reinterpret_cast<uintptr_t>(source),
                     " is not a multiple of ", kImageAlignment, ", as head blocks begin on"));
  }
  if (const absl::Status status = CheckIsGpuMemory(source, image.size()); !status.ok()) {
    return absl::Status(status.code(), absl::StrCat("page ", page.value(), ": ", status.message()));
  }
  exported_.emplace_back(source, image.size());
  return CopyFromGpu(image, source, stream_->get());
}

absl::StatusOr<std::vector<uint32_t>> GpuExporter::Finish(uint32_t num_heads) {
  std::vector<DeviceImage> images;
  for (const std::span<const std::byte> source : std::exchange(exported_, {})) {
    images.push_back({source.data(), source.size() / num_heads});
  }
  auto checksums = ChecksumOnDevice(images, num_heads, *stream_);
  CRUMB_RETURN_IF_ERROR(stream_->Wait());
  CRUMB_RETURN_IF_ERROR(pages_.Validate());
  // Of a geometry that the kernel does not know, say, the host computes them.
  return checksums.ok() ? *std::move(checksums) : std::vector<uint32_t>();
}

}  // namespace crumb
