// SPDX-License-Identifier: Apache-2.0
#include "cuda/calibrate/attention_error.h"

#include <cmath>
#include <utility>

#include "crumb/cuda/demote.h"
#include "crumb/cuda/expand.h"
#include "crumb/cuda/rotate.h"
#include "proto/base/check.h"
#include "proto/base/status_macros.h"

#include <Eigen/Dense>

namespace crumb::calibrate {
namespace {

using Rows = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

Eigen::Map<const Rows> View(const std::vector<float>& rows, size_t dim) {
  return {rows.data(), static_cast<Eigen::Index>(rows.size() / dim),
          static_cast<Eigen::Index>(dim)};
}

Rows Softmax(const Rows& scores) {
  const Rows shifted = scores.colwise() - scores.rowwise().maxCoeff();
  const Rows powers = shifted.array().exp();
  return powers.array().colwise() / powers.rowwise().sum().array();
}

Rows Centred(const Rows& scores) {
  return scores.colwise() - scores.rowwise().mean();
}

// |changed - exact|^2 / |exact|^2; 0 where there is nothing to lose.
double RelativeError(const Rows& changed, const Rows& exact) {
  const double size = static_cast<double>(exact.squaredNorm());
  return size == 0 ? 0 : static_cast<double>((changed - exact).squaredNorm()) / size;
}

}  // namespace

absl::StatusOr<StoredRows> ThroughPages(const HeadParameters& head,
                                        std::span<const float> key_rows,
                                        std::span<const float> value_rows) {
  std::vector<BFloat16> keys(size_t{kPageTokens} * head.key_dim);
  std::vector<BFloat16> values(size_t{kPageTokens} * head.value_dim);
  std::vector<std::byte> block(Int2HeadBlock{head.key_dim, head.value_dim}.bytes());
  StoredRows stored;
  for (size_t page = 0; page < key_rows.size() / keys.size(); ++page) {
    RotateKeys(head, key_rows.subspan(page * keys.size(), keys.size()), keys);
    RotateValues(head, value_rows.subspan(page * values.size(), values.size()), values);
    CRUMB_RETURN_IF_ERROR(DemoteHeadBlock(head, keys, values, block));
    ExpandHeadBlock(head, block, ExpandSpace::kModel, keys, values);
    for (const BFloat16 x : keys) {
      stored.keys.push_back(x.ToFloat());
    }
    for (const BFloat16 x : values) {
      stored.values.push_back(x.ToFloat());
    }
  }
  return stored;
}

struct AttentionProbe::Exact {
  AttentionSample sample;
  Rows scores;
  Rows weights;
  Rows outputs;

  Rows Scores(const std::vector<float>& keys) const {
    const float scale = 1 / std::sqrt(static_cast<float>(sample.key_dim));
    return View(sample.queries, sample.key_dim) * View(keys, sample.key_dim).transpose() * scale;
  }
};

AttentionProbe::AttentionProbe(AttentionSample sample) {
  CRUMB_CHECK(sample.keys.size() % (kPageTokens * sample.key_dim) == 0, "keys are of whole pages");
  CRUMB_CHECK(sample.values.size() * sample.key_dim == sample.keys.size() * sample.value_dim,
              "as many values as keys");
  auto exact = std::make_unique<Exact>();
  exact->sample = std::move(sample);
  exact->scores = exact->Scores(exact->sample.keys);
  exact->weights = Softmax(exact->scores);
  exact->outputs = exact->weights * View(exact->sample.values, exact->sample.value_dim);
  exact_ = std::move(exact);
}

AttentionProbe::~AttentionProbe() = default;

absl::StatusOr<AttentionError> AttentionProbe::Measure(const HeadParameters& head) const {
  const AttentionSample& sample = exact_->sample;
  CRUMB_CHECK(head.key_dim == sample.key_dim && head.value_dim == sample.value_dim,
              "a head of other dims");
  CRUMB_ASSIGN_OR_RETURN(const StoredRows stored, ThroughPages(head, sample.keys, sample.values));
  const Rows scores = exact_->Scores(stored.keys);
  const Rows weights = Softmax(scores);
  const auto stored_values = View(stored.values, sample.value_dim);
  return AttentionError{
      .output = RelativeError(weights * stored_values, exact_->outputs),
      .keys = RelativeError(weights * View(sample.values, sample.value_dim), exact_->outputs),
      .values = RelativeError(exact_->weights * stored_values, exact_->outputs),
      .scores = RelativeError(Centred(scores), Centred(exact_->scores))};
}

}  // namespace crumb::calibrate
