// SPDX-License-Identifier: Apache-2.0
//
// An upload whose device is the host: the copies of an UploadPlan done by memcpy, layer group after
// layer group, into memory whose other bytes keep a pattern. As a source, it shows the blocks where
// kernels would read them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

#include "client/transport/page_source.h"
#include "client/transport/upload_plan.h"

namespace crumb::testing {

class HostUpload final : public PageSource {
 public:
  // The source must have all bytes.
  HostUpload(const UploadShape& shape, const PageSource& source, uint32_t layers_per_group)
      : shape_(shape) {
    UploadPlan plan(shape, &source);
    memory_.resize(plan.bytes(), std::byte{0xa5});
    plan.PlaceAt(memory_.data());
    pages_ = plan.AddressesOfPages();
    const uint32_t num_layers = shape.geometry.num_layers;
    for (uint32_t layer = 0; layer < num_layers; layer += layers_per_group) {
      for (const GpuRowCopy& copy :
           plan.CopiesOf(layer, std::min(layers_per_group, num_layers - layer))) {
        Copy(copy);
      }
    }
  }

  const std::byte* HeadBlock(PageIdx page,
                             PageEncoding encoding,
                             uint32_t layer,
                             uint32_t kv_head) const override {
    const UploadPlan::Addresses& of = pages_[page.value()];
    const std::byte* image = encoding == PageEncoding::kInt2 ? of.int2 : of.bf16;
    const bool is_there = image != nullptr && kv_head >= shape_.heads.first &&
                          kv_head < shape_.heads.first + shape_.heads.count;
    return is_there ? image + shape_.geometry.HeadBlockOffset(encoding, layer, kv_head) : nullptr;
  }
  absl::Status WaitForLayer(uint32_t /*layer*/) override { return absl::OkStatus(); }
  absl::Status Validate() override { return absl::OkStatus(); }
  size_t copied_bytes() const override { return copied_bytes_; }
  size_t num_copies() const { return num_copies_; }

 private:
  void Copy(const GpuRowCopy& copy) {
    for (size_t row = 0; row < copy.rows; ++row) {
      std::memcpy(copy.target + row * copy.target_stride, copy.source + row * copy.source_stride,
                  copy.row_bytes);
    }
    copied_bytes_ += copy.rows * copy.row_bytes;
    ++num_copies_;
  }

  const UploadShape shape_;
  std::vector<std::byte> memory_;
  std::vector<UploadPlan::Addresses> pages_;
  size_t copied_bytes_ = 0;
  size_t num_copies_ = 0;
};

}  // namespace crumb::testing
