// SPDX-License-Identifier: Apache-2.0
//
// Which copies bring the pages of a source that lie in host memory into device memory, by layer,
// and where they lie there: page images of the rank's heads back to back, all INT2 first, else in
// the order of the source's addresses. Knows addresses, and touches no byte of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "client/transport/page_source.h"
#include "crumb/cuda/transfer.h"
#include "proto/page/geometry.h"

namespace crumb {

// What is uploaded.
struct UploadShape {
  Geometry geometry;
  HeadRange heads;  // Of the rank; count is not 0.
  uint32_t num_pages = 0;
};

// Thread-compatible.
class UploadPlan {
 public:
  // Images on the device, whole ones; null: not there in that encoding.
  struct Addresses {
    const std::byte* int2 = nullptr;
    const std::byte* bf16 = nullptr;
  };

  // `source` outlives this.
  UploadPlan(const UploadShape& shape, const PageSource* source);

  // Of device memory that the copies need; 0: all pages are in place.
  size_t bytes() const;
  // Says where that memory is. Once, before the calls below.
  void PlaceAt(std::byte* memory);
  // What brings layers [first, first + count), which are of the model.
  std::vector<GpuRowCopy> CopiesOf(uint32_t first, uint32_t count) const;
  // Of each page: copied, or where the source has it there. Only the rank's heads may be read.
  std::vector<Addresses> AddressesOfPages() const;

 private:
  // The rank's heads of a page, to be copied.
  struct Image {
    PageIdx page;
    PageEncoding encoding = PageEncoding::kInt2;
    std::byte* target = nullptr;
  };

  static size_t Index(PageEncoding encoding) { return encoding == PageEncoding::kInt2 ? 0 : 1; }
  size_t BlockBytes(PageEncoding encoding) const {
    return shape_.geometry.HeadBlockBytes(encoding);
  }
  size_t RangeBytes(PageEncoding encoding) const {
    return shape_.geometry.HeadRangeBytes(encoding);
  }
  void SortByAddress();
  // Appends what brings a layer that lies block by block.
  void AddBlocks(uint32_t layer, std::vector<GpuRowCopy>& copies) const;

  const UploadShape shape_;
  const PageSource* const source_;
  const uint32_t first_image_layer_;
  std::vector<Image> images_;
  // Of whole head ranges, as if all layers lay in images; by encoding.
  std::vector<GpuRowCopy> ranges_[2];
};

}  // namespace crumb
