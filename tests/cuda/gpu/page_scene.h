// SPDX-License-Identifier: Apache-2.0
//
// Heads and pages for the tests of the page ops: parameters that differ from head to head, so that
// a head or layer taken for another shows, and images of pages in host memory.
#pragma once

#include <cstdint>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "crumb/cuda/demote_pages.h"
#include "proto/page/geometry.h"
#include "tests/cuda/codec_testing.h"

namespace crumb {

class PageScene {
 public:
  PageScene(const Geometry& geometry, CodecId codec, uint32_t num_pages)
      : geometry_(geometry), num_pages_(num_pages) {
    for (uint32_t i = 0; i < geometry.NumHeadBlocks(); ++i) {
      owners_.push_back(
          std::make_unique<TestHead>(geometry.key_dim, geometry.value_dim, codec, 1 + i));
      TameFeedback(*owners_.back(), geometry.key_dim);
      if (codec == CodecId::kOscarInt2Tilted) {
        TakeMetricOfFeedback(*owners_.back(), geometry.key_dim);
      }
      owners_.back()->parameters().key_clip = i % 3 == 2 ? 0.0f : i % 2 == 0 ? 0.96f : 0.94f;
      owners_.back()->parameters().value_clip = i % 4 == 3 ? -1.0f : 0.92f;
      heads_.push_back(owners_.back()->parameters());
    }
  }

  // Of head block `index`.
  void RoundValuesByDeviation(size_t index) { heads_[index].values_by_deviation = true; }

  const Geometry& geometry() const { return geometry_; }
  uint32_t num_pages() const { return num_pages_; }
  const std::vector<HeadParameters>& heads() const { return heads_; }
  size_t bf16_bytes() const { return geometry_.PageBytes(PageEncoding::kBf16); }
  size_t int2_bytes() const { return geometry_.PageBytes(PageEncoding::kInt2); }

  // Page images of plain BF16 head blocks, one after another.
  std::vector<BFloat16> RandomRows(uint32_t seed) const {
    return GaussianRows(num_pages_ * bf16_bytes() / 2, 1.5f, seed);
  }

  // A table of images that lie one after another from `base` on.
  template <typename Byte>
  std::vector<Byte*> Table(Byte* base, size_t image_bytes) const {
    std::vector<Byte*> table;
    for (uint32_t page = 0; page < num_pages_; ++page) {
      table.push_back(base + page * image_bytes);
    }
    return table;
  }

  // Parameters for images in this table, all layers and heads.
  DemotePagesParams Demotion(const std::byte* const* bf16, std::byte* const* int2) const {
    DemotePagesParams params;
    params.heads.num_layers = geometry_.num_layers;
    params.heads.num_kv_heads = geometry_.num_kv_heads;
    params.heads.head_dim = geometry_.key_dim;
    params.heads.is_aware = HasFeedback(heads_[0].codec);
    params.num_pages = num_pages_;
    params.num_layers = geometry_.num_layers;
    params.num_heads = geometry_.num_kv_heads;
    params.keys = {bf16, 0, geometry_.HeadBlockBytes(PageEncoding::kBf16),
                   geometry_.HeadRangeBytes(PageEncoding::kBf16), size_t{2} * geometry_.key_dim};
    params.values = params.keys;
    params.values.offset = geometry_.Bf16Block().value_offset();
    params.int2 = {int2, 0, geometry_.HeadBlockBytes(PageEncoding::kInt2),
                   geometry_.HeadRangeBytes(PageEncoding::kInt2)};
    return params;
  }

 private:
  // As calibration gives it: what an error pushes into one of many channels is small beside it.
  static void TameFeedback(TestHead& head, uint32_t dim) {
    for (size_t i = 0; i < dim; ++i) {
      for (size_t j = i + 1; j < dim; ++j) {
        head.key_feedback()[i * dim + j] *= 0.8f;
      }
    }
  }

  // (C^T C)^-1 of the factor C, again as calibration gives it.
  static void TakeMetricOfFeedback(TestHead& head, uint32_t dim) {
    std::vector<double> inverse(size_t{dim} * dim);
    for (size_t i = dim; i-- > 0;) {
      const float* factor = head.key_feedback().data() + i * dim;
      for (size_t j = i; j < dim; ++j) {
        double sum = i == j ? 1 : 0;
        for (size_t k = i + 1; k <= j; ++k) {
          sum -= double{factor[k]} * inverse[k * dim + j];
        }
        inverse[i * dim + j] = sum / double{factor[i]};
      }
    }
    for (size_t i = 0; i < dim; ++i) {
      for (size_t j = 0; j < dim; ++j) {
        head.key_metric()[i * dim + j] = static_cast<float>(
            std::inner_product(inverse.data() + i * dim, inverse.data() + (i + 1) * dim,
                               inverse.data() + j * dim, 0.0));
      }
    }
  }

  const Geometry geometry_;
  const uint32_t num_pages_;
  std::vector<std::unique_ptr<TestHead>> owners_;
  std::vector<HeadParameters> heads_;
};

}  // namespace crumb
