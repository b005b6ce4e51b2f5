// SPDX-License-Identifier: Apache-2.0
#include "cuda/reference/demote.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "proto/base/float16.h"
#include "proto/page/page_format.h"

namespace crumb::reference {
namespace {

using Row = std::vector<float>;

// The four ranges that attention-aware rounding tries, in order; <= 0 is the whole range.
constexpr float kRangeClipRatios[] = {0.0f, 0.98f, 0.95f, 0.90f};

struct QuantizedRow {
  Float16 scale;
  Float16 min;
  std::vector<uint8_t> codes;
  float loss = 0;
};

// |row| in ascending order at floor(ratio * dim), rounded to fp16; infinity when clipping is off.
float ClipThreshold(const Row& row, float ratio) {
  if (ratio <= 0) {
    return std::numeric_limits<float>::infinity();
  }
  Row magnitudes(row.size());
  std::transform(row.begin(), row.end(), magnitudes.begin(), [](float x) { return std::fabs(x); });
  std::sort(magnitudes.begin(), magnitudes.end());
  const auto index = static_cast<size_t>(ratio * static_cast<float>(row.size()));
  return Float16::FromFloatSaturated(magnitudes[std::min(index, row.size() - 1)]).ToFloat();
}

// Scale and minimum of the four levels over [low, high]. The scale is measured from the minimum as
// stored, so that the top level meets `high`, and is at least the smallest positive fp16, 2^-24:
// a constant row then has all codes 0 and comes back exactly.
QuantizedRow Levels(float low, float high) {
  QuantizedRow result;
  result.min = Float16::FromFloatSaturated(low + 0.0f);  // A -0 becomes 0: zeros have no order.
  result.scale = Float16::FromFloatSaturated((high - result.min.ToFloat()) / 3.0f);
  if (result.scale.ToFloat() < Float16::kMinPositive) {
    result.scale = Float16::FromFloat(Float16::kMinPositive);
  }
  return result;
}

uint8_t Code(const QuantizedRow& levels, float x) {
  const float step = std::floor((x - levels.min.ToFloat()) / levels.scale.ToFloat() + 0.5f);
  if (!(step > 0)) {
    return 0;  // Also where feedback of huge values has made a NaN.
  }
  return step < 3 ? static_cast<uint8_t>(step) : uint8_t{3};
}

float Level(const QuantizedRow& levels, uint8_t code) {
  return static_cast<float>(code) * levels.scale.ToFloat() + levels.min.ToFloat();
}

QuantizedRow RoundToNearest(Row row, float clip_ratio) {
  const float tau = ClipThreshold(row, clip_ratio);
  for (float& x : row) {
    x = std::clamp(x, -tau, tau);
  }
  const auto [low, high] = std::minmax_element(row.begin(), row.end());
  QuantizedRow result = Levels(*low, *high);
  for (const float x : row) {
    result.codes.push_back(Code(result, x));
  }
  return result;
}

// Rounds channel after channel; each error goes into the channels that are still open. `feedback`
// is upper triangular, [dim, dim]. The range is cut at tau, the row is not.
QuantizedRow RoundWithFeedback(Row row, const float* feedback, float clip_ratio) {
  const float tau = ClipThreshold(row, clip_ratio);
  const auto [low, high] = std::minmax_element(row.begin(), row.end());
  QuantizedRow result = Levels(std::clamp(*low, -tau, tau), std::clamp(*high, -tau, tau));
  const size_t dim = row.size();
  for (size_t i = 0; i < dim; ++i) {
    const uint8_t code = Code(result, row[i]);
    const float* weights = feedback + i * dim;
    const float error = (row[i] - Level(result, code)) / weights[i];
    result.codes.push_back(code);
    result.loss = std::fma(error, error, result.loss);
    for (size_t j = i + 1; j < dim; ++j) {
      row[j] = std::fma(-error, weights[j], row[j]);
    }
  }
  return result;
}

QuantizedRow RoundAttentionAware(const Row& row, const float* feedback) {
  QuantizedRow best;
  bool first = true;
  for (const float ratio : kRangeClipRatios) {
    QuantizedRow candidate = RoundWithFeedback(row, feedback, ratio);
    if (first || candidate.loss < best.loss) {
      best = std::move(candidate);
    }
    first = false;
  }
  return best;
}

Row RowAt(std::span<const BFloat16> rows, uint32_t token, uint32_t dim) {
  Row row(dim);
  for (uint32_t channel = 0; channel < dim; ++channel) {
    row[channel] = rows[size_t{token} * dim + channel].ToFloat();
  }
  return row;
}

void StoreMeta(const QuantizedRow& row, std::byte* meta) {
  const uint16_t words[2] = {row.scale.bits, row.min.bits};
  std::memcpy(meta, words, sizeof(words));
}

void StoreCode(uint8_t code, CodePosition position, std::span<std::byte> block) {
  block[position.byte] |= static_cast<std::byte>(code << position.shift);
}

}  // namespace

void DemoteHeadBlock(const HeadParameters& head,
                     std::span<const BFloat16> keys,
                     std::span<const BFloat16> values,
                     std::span<std::byte> block) {
  const Int2HeadBlock format{head.key_dim, head.value_dim};
  std::fill(block.begin(), block.end(), std::byte{0});
  for (uint32_t token = 0; token < kPageTokens; ++token) {
    const Row key = RowAt(keys, token, head.key_dim);
    const QuantizedRow key_row = head.codec == CodecId::kOscarInt2Aware
                                     ? RoundAttentionAware(key, head.key_feedback)
                                     : RoundToNearest(key, head.key_clip);
    StoreMeta(key_row, block.data() + format.KeyMetaByte(token));
    for (uint32_t channel = 0; channel < head.key_dim; ++channel) {
      StoreCode(key_row.codes[channel], format.KeyCode(token, channel), block);
    }

    const QuantizedRow value_row =
        RoundToNearest(RowAt(values, token, head.value_dim), head.value_clip);
    StoreMeta(value_row, block.data() + format.ValueMetaByte(token));
    for (uint32_t channel = 0; channel < head.value_dim; ++channel) {
      StoreCode(value_row.codes[channel], format.ValueCode(token, channel), block);
    }
  }
}

}  // namespace crumb::reference
