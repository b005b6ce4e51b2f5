// SPDX-License-Identifier: Apache-2.0
#include "cuda/reference/expand.h"

#include <cstring>
#include <vector>

#include "proto/base/float16.h"
#include "proto/page/page_format.h"

namespace crumb::reference {
namespace {

struct Affine {
  float scale;
  float min;
};

Affine LoadMeta(const std::byte* meta) {
  uint16_t words[2];
  std::memcpy(words, meta, sizeof(words));
  return {Float16{words[0]}.ToFloat(), Float16{words[1]}.ToFloat()};
}

float Decode(std::span<const std::byte> block, CodePosition position, Affine affine) {
  const uint32_t code = (std::to_integer<uint32_t>(block[position.byte]) >> position.shift) & 3u;
  return static_cast<float>(code) * affine.scale + affine.min;
}

// row * rotation^T + mean (nullable), or the row as it is for a null rotation.
void StoreRow(const std::vector<float>& row,
              const float* rotation,
              const float* mean,
              BFloat16* out) {
  const size_t dim = row.size();
  for (size_t channel = 0; channel < dim; ++channel) {
    if (rotation == nullptr) {
      out[channel] = BFloat16::FromFloat(row[channel]);
      continue;
    }
    double sum = mean != nullptr ? double{mean[channel]} : 0.0;
    for (size_t i = 0; i < dim; ++i) {
      sum += double{row[i]} * double{rotation[channel * dim + i]};
    }
    out[channel] = BFloat16::FromFloat(static_cast<float>(sum));
  }
}

}  // namespace

void ExpandHeadBlock(const HeadParameters& head,
                     std::span<const std::byte> block,
                     ExpandSpace space,
                     std::span<BFloat16> keys,
                     std::span<BFloat16> values) {
  const Int2HeadBlock format{head.key_dim, head.value_dim};
  const bool rotate_back = space == ExpandSpace::kModel;
  // The transposed inverse of key_rotation, which is itself where that is orthogonal.
  const float* inverse = head.query_rotation != nullptr ? head.query_rotation : head.key_rotation;
  std::vector<float> key(head.key_dim);
  std::vector<float> value(head.value_dim);
  for (uint32_t token = 0; token < kPageTokens; ++token) {
    const Affine key_affine = LoadMeta(block.data() + format.KeyMetaByte(token));
    for (uint32_t channel = 0; channel < head.key_dim; ++channel) {
      key[channel] = Decode(block, format.KeyCode(token, channel), key_affine);
    }
    StoreRow(key, rotate_back ? inverse : nullptr, head.key_mean,
             keys.data() + size_t{token} * head.key_dim);

    const Affine value_affine = LoadMeta(block.data() + format.ValueMetaByte(token));
    for (uint32_t channel = 0; channel < head.value_dim; ++channel) {
      value[channel] = Decode(block, format.ValueCode(token, channel), value_affine);
    }
    StoreRow(value, rotate_back ? head.value_rotation : nullptr, nullptr,
             values.data() + size_t{token} * head.value_dim);
  }
}

}  // namespace crumb::reference
