// SPDX-License-Identifier: Apache-2.0
//
// What an engine that has computed a prompt hands over: pages in BF16, in its GPU's memory.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <vector>

#include "bench/gpu/service_scene.h"
#include "crumb/client.h"
#include "proto/base/bfloat16.h"

namespace crumb::bench {

// Rows as a model could make them; the same for all pages.
inline std::vector<std::byte> PageOfRows() {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<std::byte> image(kGeometry.PageBytes(PageEncoding::kBf16));
  for (size_t i = 0; i < image.size(); i += sizeof(BFloat16)) {
    const BFloat16 value = BFloat16::FromFloat(normal(random));
    std::memcpy(&image[i], &value, sizeof(value));
  }
  return image;
}

// Pages of an engine, all in BF16; one page of memory for all of them.
class Bf16Pages : public GpuPages {
 public:
  Bf16Pages(std::span<const std::byte> image, uint32_t num_pages) : num_pages_(num_pages) {
    Check(cudaMalloc(&memory_, image.size()));
    Check(cudaMemcpy(memory_, image.data(), image.size(), cudaMemcpyHostToDevice));
  }
  ~Bf16Pages() override { cudaFree(memory_); }
  Bf16Pages(const Bf16Pages&) = delete;
  Bf16Pages& operator=(const Bf16Pages&) = delete;

  uint32_t length() const override { return num_pages_ * kPageTokens; }
  const std::byte* Page(PageIdx /*page*/, PageEncoding encoding) const override {
    return encoding == PageEncoding::kBf16 ? memory_ : nullptr;
  }

 private:
  const uint32_t num_pages_;
  std::byte* memory_ = nullptr;
};

}  // namespace crumb::bench
