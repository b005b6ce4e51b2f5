// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"

#include "crumb/cuda/statistics.h"
#include "proto/base/check.h"
#include "proto/base/status_macros.h"

#include <Eigen/Dense>

namespace crumb {
namespace {

using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Vector = Eigen::VectorXd;

Eigen::Index Index(size_t value) {
  return static_cast<Eigen::Index>(value);
}

struct Rows {
  const char* name;
  std::span<const float> floats;  // [T, num_heads, dim]
  size_t num_heads;
  size_t dim;
};

absl::Status CheckRows(const Rows& rows, uint32_t layer, size_t num_tokens) {
  const size_t expected = num_tokens * rows.num_heads * rows.dim;
  if (rows.floats.size() != expected) {
    return absl::InvalidArgumentError(absl::StrCat(
        "statistics: layer ", layer, " got ", rows.floats.size(), " floats of ", rows.name, "; [",
        num_tokens, ", ", rows.num_heads, ", ", rows.dim, "] has ", expected));
  }
  const auto bad = std::ranges::find_if_not(rows.floats, [](float x) { return std::isfinite(x); });
  if (bad != rows.floats.end()) {
    const auto at = static_cast<size_t>(bad - rows.floats.begin());
    return absl::InvalidArgumentError(
        absl::StrCat("statistics: ", rows.name, " of layer ", layer, ", token ",
                     at / (rows.num_heads * rows.dim), ", head ", at / rows.dim % rows.num_heads,
                     ", channel ", at % rows.dim, " is ", std::isnan(*bad) ? "NaN" : "infinite"));
  }
  return absl::OkStatus();
}

// Rows [first, T) of one head, in double: [T - first, dim].
Matrix HeadRows(const Rows& rows, size_t head, size_t first) {
  const size_t row_floats = rows.num_heads * rows.dim;
  const size_t num_tokens = rows.floats.size() / row_floats;
  using FloatMatrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  return Eigen::Map<const FloatMatrix, 0, Eigen::OuterStride<>>(
             rows.floats.data() + first * row_floats + head * rows.dim, Index(num_tokens - first),
             Index(rows.dim), Eigen::OuterStride<>(Index(row_floats)))
      .cast<double>();
}

// x^T x, both triangles equal to the bit.
Matrix Gram(const Matrix& x) {
  Matrix gram = Matrix::Zero(x.cols(), x.cols());
  gram.selfadjointView<Eigen::Lower>().rankUpdate(x.transpose());
  gram.triangularView<Eigen::StrictlyUpper>() = gram.transpose();
  return gram;
}

void AddTo(const Matrix& matrix, double* sums) {
  Eigen::Map<Matrix>(sums, matrix.rows(), matrix.cols()) += matrix;
}

}  // namespace

struct StatisticsCollector::State {
  Options options;
  // Sums over texts; Finish divides.
  std::vector<double> query_moment;
  std::vector<double> query_mean;
  std::vector<double> value_covariance;
  std::vector<double> key_mean;
  std::vector<double> key_moment;
  std::vector<uint64_t> texts_of_layer;
  std::vector<uint64_t> tokens_of_layer;

  // Adds one KV head of one text.
  void AddHead(
      size_t block, const Rows& queries, const Rows& keys, const Rows& values, size_t kv_head);
};

absl::StatusOr<StatisticsCollector> StatisticsCollector::Create(Options options) {
  const Geometry& geometry = options.geometry;
  if (!geometry.IsValid()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "statistics: ", geometry.num_layers, " layers, ", geometry.num_kv_heads,
        " KV heads, key_dim ", geometry.key_dim, ", value_dim ", geometry.value_dim,
        " is not a valid geometry: at most ", Geometry::kMaxLayers, " layers, ",
        Geometry::kMaxKvHeads, " heads, dims that are multiples of 32 up to ", kMaxHeadDim));
  }
  if (options.num_query_heads == 0 || options.num_query_heads % geometry.num_kv_heads != 0) {
    return absl::InvalidArgumentError(absl::StrCat("statistics: ", options.num_query_heads,
                                                   " query heads are not a multiple of ",
                                                   geometry.num_kv_heads, " KV heads"));
  }
  const size_t blocks = geometry.NumHeadBlocks();
  auto state = std::make_unique<State>();
  state->options = std::move(options);
  state->query_moment.resize(blocks * geometry.key_dim * geometry.key_dim);
  state->value_covariance.resize(blocks * geometry.value_dim * geometry.value_dim);
  state->query_mean.resize(blocks * geometry.key_dim);
  state->key_mean.resize(blocks * geometry.key_dim);
  state->key_moment.resize(blocks * geometry.key_dim * geometry.key_dim);
  state->texts_of_layer.resize(geometry.num_layers);
  state->tokens_of_layer.resize(geometry.num_layers);
  return StatisticsCollector(std::move(state));
}

StatisticsCollector::StatisticsCollector(std::unique_ptr<State> state) : state_(std::move(state)) {}
StatisticsCollector::StatisticsCollector(StatisticsCollector&& other) noexcept = default;
StatisticsCollector& StatisticsCollector::operator=(StatisticsCollector&& other) noexcept = default;
StatisticsCollector::~StatisticsCollector() = default;

absl::Status StatisticsCollector::AddText(uint32_t layer,
                                          std::span<const float> queries,
                                          std::span<const float> keys,
                                          std::span<const float> values) {
  const Geometry& geometry = state_->options.geometry;
  if (layer >= geometry.num_layers) {
    return absl::InvalidArgumentError(
        absl::StrCat("statistics: layer ", layer, " of ", geometry.num_layers));
  }
  const Rows query_rows{"queries", queries, state_->options.num_query_heads, geometry.key_dim};
  const Rows key_rows{"keys", keys, geometry.num_kv_heads, geometry.key_dim};
  const Rows value_rows{"values", values, geometry.num_kv_heads, geometry.value_dim};
  const size_t num_tokens = keys.size() / (key_rows.num_heads * key_rows.dim);
  for (const Rows& rows : {query_rows, key_rows, value_rows}) {
    CRUMB_RETURN_IF_ERROR(CheckRows(rows, layer, num_tokens));
  }
  if (num_tokens <= Statistics::kFirstQueryToken) {
    return absl::InvalidArgumentError(absl::StrCat(
        "statistics: a text of ", num_tokens, " tokens has no queries after the first ",
        Statistics::kFirstQueryToken, "; leave it out or join it to another"));
  }
  for (size_t kv_head = 0; kv_head < geometry.num_kv_heads; ++kv_head) {
    state_->AddHead(layer * size_t{geometry.num_kv_heads} + kv_head, query_rows, key_rows,
                    value_rows, kv_head);
  }
  state_->texts_of_layer[layer] += 1;
  state_->tokens_of_layer[layer] += num_tokens;
  return absl::OkStatus();
}

void StatisticsCollector::State::AddHead(
    size_t block, const Rows& queries, const Rows& keys, const Rows& values, size_t kv_head) {
  const size_t group = queries.num_heads / keys.num_heads;
  Matrix moment = Matrix::Zero(Index(keys.dim), Index(keys.dim));
  Vector query_sum = Vector::Zero(Index(keys.dim));
  double num_rows = 0;
  for (size_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    const Matrix rows = HeadRows(queries, head, Statistics::kFirstQueryToken);
    moment += Gram(rows);
    query_sum += rows.colwise().sum().transpose();
    num_rows += static_cast<double>(rows.rows());
  }
  moment /= num_rows;
  AddTo(moment, query_moment.data() + block * keys.dim * keys.dim);
  Eigen::Map<Vector>(query_mean.data() + block * keys.dim, Index(keys.dim)) += query_sum / num_rows;

  const Matrix key_rows = HeadRows(keys, kv_head, 0);
  const Eigen::Index first = Statistics::kFirstKeyToken;
  const Matrix late_keys = key_rows.bottomRows(key_rows.rows() - first);
  Eigen::Map<Vector>(key_mean.data() + block * keys.dim, Index(keys.dim)) +=
      late_keys.colwise().mean().transpose();
  AddTo(Gram(late_keys) / static_cast<double>(late_keys.rows()),
        key_moment.data() + block * keys.dim * keys.dim);

  // Rows scaled by the root of their weight, so that the product is a Gram matrix. Rounding may
  // take a weight that should be zero below it.
  const Vector weight = (key_rows * moment).cwiseProduct(key_rows).rowwise().sum().cwiseMax(0.0);
  Matrix value_rows = HeadRows(values, kv_head, 0);
  if (const double sum = weight.sum(); sum > 0) {
    value_rows.array().colwise() *= (weight.array() / sum).sqrt();
  } else {
    value_rows /= std::sqrt(static_cast<double>(value_rows.rows()));
  }
  AddTo(Gram(value_rows), value_covariance.data() + block * values.dim * values.dim);
}

absl::StatusOr<Statistics> StatisticsCollector::Finish() const {
  const uint64_t num_texts = state_->texts_of_layer[0];
  if (num_texts == 0) {
    return absl::FailedPreconditionError("statistics: no text was added");
  }
  for (uint32_t layer = 1; layer < state_->options.geometry.num_layers; ++layer) {
    if (state_->texts_of_layer[layer] != num_texts ||
        state_->tokens_of_layer[layer] != state_->tokens_of_layer[0]) {
      return absl::FailedPreconditionError(
          absl::StrCat("statistics: layer ", layer, " has seen ", state_->texts_of_layer[layer],
                       " texts of ", state_->tokens_of_layer[layer], " tokens, layer 0 ", num_texts,
                       " of ", state_->tokens_of_layer[0]));
    }
  }
  const auto mean = [&](const std::vector<double>& sums) {
    std::vector<double> means = sums;
    for (double& x : means) {
      x /= static_cast<double>(num_texts);
    }
    return means;
  };
  Statistics statistics;
  statistics.model = state_->options.model;
  statistics.geometry = state_->options.geometry;
  statistics.num_query_heads = state_->options.num_query_heads;
  statistics.num_texts = num_texts;
  statistics.num_tokens = state_->tokens_of_layer[0];
  statistics.query_moment = mean(state_->query_moment);
  statistics.query_mean = mean(state_->query_mean);
  statistics.value_covariance = mean(state_->value_covariance);
  statistics.key_mean = mean(state_->key_mean);
  statistics.key_moment = mean(state_->key_moment);
  return statistics;
}

}  // namespace crumb
