// SPDX-License-Identifier: Apache-2.0
#include "cuda/calibrate/attention_mass.h"

#include <algorithm>
#include <cmath>

#include "crumb/cuda/statistics.h"
#include "proto/base/check.h"

namespace crumb::calibrate {
namespace {

Eigen::Index Index(size_t value) {
  return static_cast<Eigen::Index>(value);
}

float Scale(size_t dim) {
  return 1 / std::sqrt(static_cast<float>(dim));
}

}  // namespace

std::vector<double> HistoryMass(const TokenRows& queries,
                                const TokenRows& keys,
                                size_t kv_head,
                                uint32_t window) {
  constexpr size_t kFirstQuery = Statistics::kFirstQueryToken;
  constexpr size_t kStride = Statistics::kAttentionStride;
  const size_t group = queries.num_heads / keys.num_heads;
  std::vector<double> mass(keys.num_tokens());
  const HeadView key_rows = ViewHead(keys, kv_head, 0);
  for (size_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    const RowsF32 scores =
        Scale(keys.dim) * ViewHead(queries, head, kFirstQuery, kStride) * key_rows.transpose();
    for (Eigen::Index row = 0; row < scores.rows(); ++row) {
      const size_t position = kFirstQuery + static_cast<size_t>(row) * kStride;
      const size_t first = FirstKeySeen(position, window);
      const auto seen = scores.row(row).segment(Index(first), Index(position + 1 - first)).array();
      const float peak = seen.maxCoeff();
      const Eigen::ArrayXf powers = (seen - peak).exp();
      const double sum = powers.cast<double>().sum();
      for (size_t key = std::max<size_t>(first, Statistics::kFirstKeyToken);
           key + kFirstQuery <= position; ++key) {
        mass[key] += static_cast<double>(powers(Index(key - first))) / sum;
      }
    }
  }
  return mass;
}

float Attend(std::span<const float> query,
             size_t position,
             uint32_t window,
             const HeadView& keys,
             const HeadView& values,
             std::span<float> output) {
  CRUMB_CHECK(Index(position) < keys.rows() && keys.rows() == values.rows(), "no such position");
  const size_t first = FirstKeySeen(position, window);
  const Eigen::Index count = Index(position + 1 - first);
  const Eigen::Map<const Eigen::VectorXf> row(query.data(), Index(query.size()));
  const Eigen::VectorXf scores = Scale(query.size()) * (keys.middleRows(Index(first), count) * row);
  const float peak = scores.maxCoeff();
  const Eigen::VectorXf powers = (scores.array() - peak).exp();
  const float sum = powers.sum();
  Eigen::Map<Eigen::VectorXf>(output.data(), Index(output.size())) =
      values.middleRows(Index(first), count).transpose() * powers / sum;
  return peak + std::log(sum);
}

}  // namespace crumb::calibrate
