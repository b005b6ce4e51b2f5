// SPDX-License-Identifier: Apache-2.0
#include "client/transport/upload_plan.h"

#include <algorithm>
#include <functional>

namespace crumb {
namespace {

constexpr PageEncoding kEncodings[] = {PageEncoding::kInt2, PageEncoding::kBf16};

// Where a whole would begin of which the part before `from` is not there.
template <typename Byte>
Byte* Before(Byte* from, size_t bytes) {
  // By numbers, since no pointer may be there either.
  return reinterpret_cast<Byte*>(  // NOLINT(performance-no-int-to-ptr)
      reinterpret_cast<uintptr_t>(from) - bytes);
}

// Rows that go on where the last copy ends, here and there, become a part of it.
void Append(const GpuRowCopy& rows, std::vector<GpuRowCopy>& copies) {
  if (!copies.empty()) {
    GpuRowCopy& last = copies.back();
    if (last.row_bytes == rows.row_bytes && last.source_stride == rows.source_stride &&
        last.target_stride == rows.target_stride &&
        last.source + last.rows * last.source_stride == rows.source &&
        last.target + last.rows * last.target_stride == rows.target) {
      last.rows += rows.rows;
      return;
    }
  }
  copies.push_back(rows);
}

}  // namespace

UploadPlan::UploadPlan(const UploadShape& shape, const PageSource* source)
    : shape_(shape),
      source_(source),
      first_image_layer_(std::min(source->first_image_layer(), shape.geometry.num_layers)) {
  for (const PageEncoding encoding : kEncodings) {
    for (uint32_t page = 0; page < shape_.num_pages; ++page) {
      if (source_->HeadBlock(PageIdx(page), encoding, 0, shape_.heads.first) != nullptr) {
        images_.push_back({PageIdx(page), encoding});
      }
    }
  }
  if (first_image_layer_ == 0) {
    SortByAddress();
  }
}

// Images lie on the device in the order in which they lie here: the page tables name each, and
// where all of a chunk is wanted, it is one copy a group of layers. A daemon that has demoted pages
// on several threads has them in no order of its own.
void UploadPlan::SortByAddress() {
  const auto address = [this](const Image& image) {
    return source_->HeadBlock(image.page, image.encoding, 0, shape_.heads.first);
  };
  std::sort(images_.begin(), images_.end(), [&](const Image& a, const Image& b) {
    return a.encoding != b.encoding ? Index(a.encoding) < Index(b.encoding)
                                    : std::less<>()(address(a), address(b));
  });
}

size_t UploadPlan::bytes() const {
  size_t bytes = 0;
  for (const Image& image : images_) {
    bytes += shape_.heads.count * RangeBytes(image.encoding);
  }
  return bytes;
}

void UploadPlan::PlaceAt(std::byte* memory) {
  for (Image& image : images_) {
    image.target = memory;
    memory += shape_.heads.count * RangeBytes(image.encoding);
    if (first_image_layer_ < shape_.geometry.num_layers) {
      const size_t range_bytes = RangeBytes(image.encoding);
      const std::byte* const block =
          source_->HeadBlock(image.page, image.encoding, first_image_layer_, shape_.heads.first);
      const size_t skipped = first_image_layer_ * BlockBytes(image.encoding);
      Append({.target = image.target,
              .target_stride = range_bytes,
              .source = Before(block, skipped),
              .source_stride = range_bytes,
              .row_bytes = range_bytes,
              .rows = shape_.heads.count},
             ranges_[Index(image.encoding)]);
    }
  }
}

std::vector<GpuRowCopy> UploadPlan::CopiesOf(uint32_t first, uint32_t count) const {
  std::vector<GpuRowCopy> copies;
  for (; count > 0 && first < first_image_layer_; ++first, --count) {
    AddBlocks(first, copies);
  }
  for (const PageEncoding encoding : kEncodings) {
    const size_t block_bytes = BlockBytes(encoding);
    for (GpuRowCopy copy : ranges_[Index(encoding)]) {
      copy.source += first * block_bytes;
      copy.target += first * block_bytes;
      copy.row_bytes = count * block_bytes;
      if (count > 0) {
        copies.push_back(copy);
      }
    }
  }
  return copies;
}

void UploadPlan::AddBlocks(uint32_t layer, std::vector<GpuRowCopy>& copies) const {
  for (const Image& image : images_) {
    const size_t block_bytes = BlockBytes(image.encoding);
    Append({.target = image.target + layer * block_bytes,
            .target_stride = RangeBytes(image.encoding),
            .source = source_->HeadBlock(image.page, image.encoding, layer, shape_.heads.first),
            .source_stride = block_bytes,
            .row_bytes = block_bytes,
            .rows = shape_.heads.count},
           copies);
  }
}

std::vector<UploadPlan::Addresses> UploadPlan::AddressesOfPages() const {
  std::vector<Addresses> pages(shape_.num_pages);
  for (uint32_t page = 0; page < shape_.num_pages; ++page) {
    pages[page] = {source_->GpuPage(PageIdx(page), PageEncoding::kInt2),
                   source_->GpuPage(PageIdx(page), PageEncoding::kBf16)};
  }
  for (const Image& image : images_) {
    Addresses& of = pages[image.page.value()];
    (image.encoding == PageEncoding::kInt2 ? of.int2 : of.bf16) =
        Before(image.target, shape_.heads.first * RangeBytes(image.encoding));
  }
  return pages;
}

}  // namespace crumb
