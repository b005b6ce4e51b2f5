// SPDX-License-Identifier: Apache-2.0
//
// Where a publish takes pages from: a sequence in host memory, or an engine's own pages on a GPU.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "crumb/client.h"
#include "crumb/cuda/transfer.h"
#include "crumb/sequence.h"

namespace crumb {

// Thread-compatible.
class PageExporter {
 public:
  virtual ~PageExporter() = default;

  virtual uint32_t length() const = 0;  // Tokens.
  virtual bool HasPage(PageIdx page, PageEncoding encoding) const = 0;
  // The image of the rank's heads, all heads of one size; there once Finish returned OK. After an
  // error of either no image is written any more. NOT_FOUND: not held.
  virtual absl::Status ExportPage(PageIdx page,
                                  PageEncoding encoding,
                                  std::span<std::byte> image) = 0;
  // Ends the exports since the last Finish. Checksums of their heads, [page][head] in the order of
  // the calls, where the exporter has better ways to them than a pass over the images; else none.
  virtual absl::StatusOr<std::vector<uint32_t>> Finish(uint32_t /*num_heads*/) {
    return std::vector<uint32_t>();
  }
  // Whether images are best exported to memory that is registered with the current GPU.
  virtual bool wants_registered_memory() const { return false; }
};

class SequenceExporter : public PageExporter {
 public:
  explicit SequenceExporter(const Sequence& sequence) : sequence_(sequence) {}

  uint32_t length() const override { return sequence_.length(); }
  bool HasPage(PageIdx page, PageEncoding encoding) const override {
    return sequence_.HasPage(page, encoding);
  }
  absl::Status ExportPage(PageIdx page, PageEncoding encoding, std::span<std::byte> image) override;
  absl::StatusOr<std::vector<uint32_t>> Finish(uint32_t num_heads) override;

 private:
  const Sequence& sequence_;
  std::vector<uint32_t> head_crc32c_;  // Of the pages exported since the last Finish.
};

// On the current device of the thread that makes it and uses it.
class GpuExporter : public PageExporter {
 public:
  static absl::StatusOr<std::unique_ptr<GpuExporter>> Create(const GpuPages& pages);

  uint32_t length() const override { return pages_.length(); }
  bool HasPage(PageIdx page, PageEncoding encoding) const override {
    return pages_.Page(page, encoding) != nullptr;
  }
  // INVALID_ARGUMENT also: the page is not in the device's memory, or not aligned.
  absl::Status ExportPage(PageIdx page, PageEncoding encoding, std::span<std::byte> image) override;
  absl::StatusOr<std::vector<uint32_t>> Finish(uint32_t num_heads) override;
  bool wants_registered_memory() const override { return true; }

 private:
  explicit GpuExporter(const GpuPages& pages) : pages_(pages) {}
  absl::Status StartExport(PageIdx page, PageEncoding encoding, std::span<std::byte> image);

  const GpuPages& pages_;
  std::unique_ptr<OwnGpuStream> stream_;
  std::vector<std::span<const std::byte>> exported_;  // On the device, since the last Finish.
};

}  // namespace crumb
