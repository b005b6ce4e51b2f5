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

// A refit is left out where it is not well determined: levels or the determinant at less than this
// share of what they are differences of, or a scale that would change by more than half.
constexpr float kLeastShare = 1e-3f;
constexpr float kMostStretch = 0.5f;

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

// The sum of term(channel) in the order that every path keeps: four sums, each of the pairs of
// channels 8 n + 2 t and 8 n + 2 t + 1, which is how tensor cores leave a row in four lanes.
template <typename Term>
float SumOver(size_t dim, Term term) {
  float quarters[4] = {};
  for (size_t i = 0; i < dim; i += 2) {
    quarters[i / 2 % 4] += term(i) + term(i + 1);
  }
  return (quarters[0] + quarters[1]) + (quarters[2] + quarters[3]);
}

// Codes as the best four equidistant levels of a normal row have them, their middle at its mean and
// kStep deviations apart: by their signs about the mean and by whether they are beyond one step.
// Then scale and minimum such that what comes back has the row's mean, and its own size along the
// row: sum of y yhat = sum of y^2 for y = x - mean. (Least squares would shrink it, by as much as
// its squared error, and attention over many rows averages errors away and keeps what all have
// shrunk by.)
QuantizedRow RoundByDeviation(Row row) {
  constexpr float kStepSquare = 0.99142f;  // 0.9957^2
  constexpr float kMostBf16 = 65280.0f;    // The largest bf16 that fp16 holds.
  for (float& x : row) {
    x = std::clamp(x, -kMostBf16, kMostBf16);
  }
  const auto dim = static_cast<float>(row.size());
  const float mean = SumOver(row.size(), [&](size_t i) { return row[i]; }) / dim;
  for (float& x : row) {
    x -= mean;
  }
  const float squares = SumOver(row.size(), [&](size_t i) { return row[i] * row[i]; });
  const float far_square = squares * (kStepSquare / dim);
  const auto is_outer = [&](float y) { return y * y > far_square; };
  QuantizedRow result;
  if (squares < dim * (Float16::kMinPositive * Float16::kMinPositive)) {
    result.codes.assign(row.size(), 0);  // Constant, as far as fp16 can tell.
    result.scale = Float16::FromFloat(Float16::kMinPositive);
    result.min = Float16::FromFloatSaturated(mean + 0.0f);
    return result;
  }
  float code_sum = 0;
  for (const float y : row) {
    const int outer = is_outer(y) ? 1 : 0;
    result.codes.push_back(static_cast<uint8_t>(y < 0 ? 1 - outer : 2 + outer));
    code_sum += static_cast<float>(result.codes.back());
  }
  // Of y with its code's distance from the middle, 1/2 or 3/2 steps on its own side.
  const float along = SumOver(
      row.size(), [&](size_t i) { return std::fabs(row[i]) * (is_outer(row[i]) ? 1.5f : 0.5f); });
  const float scale = Float16::FromFloatSaturated(squares / along).ToFloat();
  result.scale = Float16::FromFloat(std::max(scale, float{Float16::kMinPositive}));
  result.min =
      Float16::FromFloatSaturated((mean - result.scale.ToFloat() * (code_sum / dim)) + 0.0f);
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

float Dot(const Row& a, const Row& b) {
  float sum = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    sum = std::fma(a[i], b[i], sum);
  }
  return sum;
}

float Sum(const Row& a) {
  float sum = 0;
  for (const float x : a) {
    sum += x;
  }
  return sum;
}

// How the queries that attend to one row x measure its error: by M + t t^T, M the head's metric and
// t = m + (M - m m^T) x / sqrt(dim) the mean of these queries, were queries normal of mean m.
struct ReaderMetric {
  Row x;
  Row ones_m;       // M times the row of ones.
  Row x_m;          // M x.
  Row tilt;         // t.
  float ones2 = 0;  // Products in M: 1.1, x.1, x.x.
  float x_ones = 0;
  float x2 = 0;
  float tilt_ones = 0;  // And with t: t.1, t.x.
  float tilt_x = 0;
};

ReaderMetric MakeReaderMetric(const HeadParameters& head, const Row& row) {
  const size_t dim = row.size();
  ReaderMetric metric;
  metric.x = row;
  metric.ones_m = metric.x_m = metric.tilt = Row(dim);
  for (size_t i = 0; i < dim; ++i) {
    for (size_t j = 0; j < dim; ++j) {
      metric.ones_m[j] += head.key_metric[i * dim + j];
      metric.x_m[j] = std::fma(row[i], head.key_metric[i * dim + j], metric.x_m[j]);
    }
  }
  const Row mean(head.query_mean, head.query_mean + dim);
  const float mean_score = Dot(mean, row);
  const float scale = 1 / std::sqrt(static_cast<float>(dim));
  for (size_t j = 0; j < dim; ++j) {
    metric.tilt[j] = std::fma(scale, std::fma(-mean_score, mean[j], metric.x_m[j]), mean[j]);
  }
  metric.ones2 = Sum(metric.ones_m);
  metric.x_ones = Dot(row, metric.ones_m);
  metric.x2 = Dot(row, metric.x_m);
  metric.tilt_ones = Sum(metric.tilt);
  metric.tilt_x = Dot(metric.tilt, row);
  return metric;
}

// Moves scale and minimum to where the row's error e, codes as they are, is least for its readers,
// and sets the loss to what it is then. With v = scale * codes = x - min - e, all products with v
// and e in the metric follow from three sums over the row and from e.e, which feedback has summed.
void RefitForReaders(const ReaderMetric& metric, QuantizedRow* row) {
  const float a = row->scale.ToFloat();
  const float b = row->min.ToFloat();
  Row error(metric.x.size());
  for (size_t i = 0; i < error.size(); ++i) {
    error[i] = metric.x[i] - Level(*row, row->codes[i]);
  }
  const float ex = Dot(error, metric.x_m);
  const float e1 = Dot(error, metric.ones_m);
  const float et = Dot(error, metric.tilt);
  const float e2 = row->loss;

  const float b11 = b * (b * metric.ones2);
  const float size = (metric.x2 + b11) + e2;
  const float cross = (b * metric.x_ones + ex) - b * e1;
  const float v2 = size - 2 * cross;
  const float v1 = (metric.x_ones - b * metric.ones2) - e1;
  const float ve = (ex - b * e1) - e2;
  const float vt = (metric.tilt_x - b * metric.tilt_ones) - et;

  const float vv = v2 + vt * vt;
  const float vo = v1 + vt * metric.tilt_ones;
  const float oo = metric.ones2 + metric.tilt_ones * metric.tilt_ones;
  const float ev = ve + vt * et;
  const float eo = e1 + metric.tilt_ones * et;
  const float determinant = vv * oo - vo * vo;
  const float stretch = (ev * oo - eo * vo) / determinant;
  const bool is_determined = v2 > kLeastShare * size && determinant > kLeastShare * (vv * oo) &&
                             std::fabs(stretch) < kMostStretch;
  float p = 0;  // As stored, the scale grows by p of itself and the minimum by r.
  float r = 0;
  if (is_determined) {
    const float scale = std::max(Float16::FromFloatSaturated(a + a * stretch).ToFloat(),
                                 float{Float16::kMinPositive});
    row->scale = Float16::FromFloat(scale);
    p = (scale - a) / a;
    row->min = Float16::FromFloatSaturated((b + (eo - p * vo) / oo) + 0.0f);
    r = row->min.ToFloat() - b;
  }
  const float gain = p * ev + r * eo;
  const float curve = (p * p) * vv + ((2 * p) * (r * vo) + (r * r) * oo);
  row->loss = (e2 + et * et) - (2 * gain - curve);
}

// Without feedback: all values, and the keys of some codecs.
QuantizedRow RoundPlainly(const Row& row, bool by_deviation, float clip_ratio) {
  return by_deviation ? RoundByDeviation(row) : RoundToNearest(row, clip_ratio);
}

QuantizedRow RoundAttentionAware(const Row& row, const HeadParameters& head) {
  const bool is_tilted = head.codec == CodecId::kOscarInt2Tilted;
  const ReaderMetric metric = is_tilted ? MakeReaderMetric(head, row) : ReaderMetric();
  const auto in_range = [&](float ratio) {
    QuantizedRow candidate = RoundWithFeedback(row, head.key_feedback, ratio);
    if (is_tilted) {
      RefitForReaders(metric, &candidate);
    }
    return candidate;
  };
  QuantizedRow best = in_range(0);  // The whole range.
  for (const float ratio : head.key_ranges) {
    QuantizedRow candidate = in_range(ratio);
    if (candidate.loss < best.loss) {
      best = std::move(candidate);
    }
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
    const QuantizedRow key_row =
        HasFeedback(head.codec)
            ? RoundAttentionAware(key, head)
            : RoundPlainly(key, head.codec == CodecId::kOscarInt2Lm, head.key_clip);
    StoreMeta(key_row, block.data() + format.KeyMetaByte(token));
    for (uint32_t channel = 0; channel < head.key_dim; ++channel) {
      StoreCode(key_row.codes[channel], format.KeyCode(token, channel), block);
    }

    const QuantizedRow value_row = RoundPlainly(RowAt(values, token, head.value_dim),
                                                head.values_by_deviation, head.value_clip);
    StoreMeta(value_row, block.data() + format.ValueMetaByte(token));
    for (uint32_t channel = 0; channel < head.value_dim; ++channel) {
      StoreCode(value_row.codes[channel], format.ValueCode(token, channel), block);
    }
  }
}

}  // namespace crumb::reference
