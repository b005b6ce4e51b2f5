// SPDX-License-Identifier: Apache-2.0
#include "client/session/page_exporter.h"

#include "absl/strings/str_cat.h"

#include "proto/base/status_macros.h"

namespace crumb {

absl::StatusOr<std::unique_ptr<GpuExporter>> GpuExporter::Create(const GpuPages& pages) {
  std::unique_ptr<GpuExporter> exporter(new GpuExporter(pages));
  CRUMB_ASSIGN_OR_RETURN(exporter->stream_, OwnGpuStream::Create());
  return exporter;
}

absl::Status GpuExporter::ExportPage(PageIdx page,
                                     PageEncoding encoding,
                                     std::span<std::byte> image) {
  const std::byte* const source = pages_.Page(page, encoding);
  if (source == nullptr) {
    return absl::NotFoundError(absl::StrCat("page ", page.value(),
                                            " is not held on the GPU any more; it must stay until "
                                            "the publish returns"));
  }
  return CopyFromGpu(image, source, stream_->get());
}

absl::Status GpuExporter::Finish() {
  CRUMB_RETURN_IF_ERROR(stream_->Wait());
  return pages_.Validate();
}

}  // namespace crumb
