// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"

#include "crumb/cuda/statistics.h"
#include "cuda/calibrate/attention_mass.h"
#include "cuda/calibrate/attention_rows.h"
#include "cuda/calibrate/reservoir_sampler.h"
#include "proto/base/check.h"
#include "proto/base/status_macros.h"

#include <Eigen/Dense>

namespace crumb {
namespace {

using calibrate::TokenRows;
using calibrate::ViewHead;
using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Vector = Eigen::VectorXd;

Eigen::Index Index(size_t value) {
  return static_cast<Eigen::Index>(value);
}

absl::Status CheckRows(const TokenRows& rows, uint32_t layer, size_t num_tokens) {
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
Matrix HeadRows(const TokenRows& rows, size_t head, size_t first) {
  return ViewHead(rows, head, first).cast<double>();
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

void AddTo(const Vector& vector, double* sums) {
  Eigen::Map<Vector>(sums, vector.size()) += vector;
}

// sum w v v^T, w scaled to a sum of one; all alike if it is zero.
Matrix WeightedGram(Matrix rows, const Vector& weight) {
  // Rows scaled by the root of their weight, so that the product is a Gram matrix.
  if (const double sum = weight.sum(); sum > 0) {
    rows.array().colwise() *= (weight.array() / sum).sqrt();
  } else {
    rows /= std::sqrt(static_cast<double>(rows.rows()));
  }
  return Gram(rows);
}

struct Moment {
  std::vector<double> Statistics::*member;
  bool is_of_keys;  // Of key_dim channels, not value_dim.
  bool is_matrix;
};

constexpr Moment kMoments[] = {
    {&Statistics::query_moment, true, true},
    {&Statistics::query_mean, true, false},
    {&Statistics::value_covariance, false, true},
    {&Statistics::key_mean, true, false},
    {&Statistics::key_moment, true, true},
    {&Statistics::value_mean, false, false},
    {&Statistics::value_moment, false, true},
    {&Statistics::value_attention_covariance, false, true},
};

}  // namespace

struct StatisticsCollector::State {
  Options options;
  Statistics sums;  // Its moments are summed over texts; Finish divides.
  std::vector<calibrate::ReservoirSampler> reservoirs;  // A layer each.
  std::vector<uint64_t> texts_of_layer;
  std::vector<uint64_t> tokens_of_layer;

  // Adds one KV head of one text.
  void AddHead(uint32_t layer,
               size_t kv_head,
               const TokenRows& queries,
               const TokenRows& keys,
               const TokenRows& values);
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
  if (options.attention_windows.empty()) {
    options.attention_windows.resize(geometry.num_layers);
  }
  if (options.attention_windows.size() != geometry.num_layers) {
    return absl::InvalidArgumentError(absl::StrCat("statistics: ", options.attention_windows.size(),
                                                   " attention windows for ", geometry.num_layers,
                                                   " layers; one a layer, or none, is expected"));
  }
  auto state = std::make_unique<State>();
  for (const auto& [member, is_of_keys, is_matrix] : kMoments) {
    const size_t dim = is_of_keys ? geometry.key_dim : geometry.value_dim;
    (state->sums.*member).resize(geometry.NumHeadBlocks() * dim * (is_matrix ? dim : 1));
  }
  for (const uint32_t window : options.attention_windows) {
    state->reservoirs.emplace_back(options.seed, window);
  }
  state->options = std::move(options);
  state->texts_of_layer.resize(state->reservoirs.size());
  state->tokens_of_layer.resize(state->reservoirs.size());
  return StatisticsCollector(std::move(state));
}

absl::StatusOr<StatisticsCollector> StatisticsCollector::Resume(const Statistics& statistics,
                                                                uint64_t seed) {
  CRUMB_ASSIGN_OR_RETURN(StatisticsCollector collector,
                         Create({.model = statistics.model,
                                 .geometry = statistics.geometry,
                                 .num_query_heads = statistics.num_query_heads,
                                 .attention_windows = statistics.attention_windows,
                                 .seed = seed}));
  State& state = *collector.state_;
  for (const Moment& moment : kMoments) {
    std::vector<double>& sums = state.sums.*moment.member;
    CRUMB_CHECK(sums.size() == (statistics.*moment.member).size(), "statistics of another shape");
    sums = statistics.*moment.member;
    for (double& x : sums) {
      x *= static_cast<double>(statistics.num_texts);
    }
  }
  for (size_t layer = 0; layer < state.reservoirs.size(); ++layer) {
    state.reservoirs[layer].Restore(statistics.reservoir, layer, statistics.geometry.num_kv_heads);
  }
  std::ranges::fill(state.texts_of_layer, statistics.num_texts);
  std::ranges::fill(state.tokens_of_layer, statistics.num_tokens);
  return collector;
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
  const TokenRows query_rows{"queries", queries, state_->options.num_query_heads, geometry.key_dim};
  const TokenRows key_rows{"keys", keys, geometry.num_kv_heads, geometry.key_dim};
  const TokenRows value_rows{"values", values, geometry.num_kv_heads, geometry.value_dim};
  const size_t num_tokens = keys.size() / (key_rows.num_heads * key_rows.dim);
  for (const TokenRows& rows : {query_rows, key_rows, value_rows}) {
    CRUMB_RETURN_IF_ERROR(CheckRows(rows, layer, num_tokens));
  }
  if (num_tokens <= Statistics::kFirstQueryToken) {
    return absl::InvalidArgumentError(absl::StrCat(
        "statistics: a text of ", num_tokens, " tokens has no queries after the first ",
        Statistics::kFirstQueryToken, "; leave it out or join it to another"));
  }
  for (size_t kv_head = 0; kv_head < geometry.num_kv_heads; ++kv_head) {
    state_->AddHead(layer, kv_head, query_rows, key_rows, value_rows);
  }
  state_->reservoirs[layer].AddText(static_cast<uint32_t>(state_->texts_of_layer[layer]),
                                    query_rows, key_rows, value_rows);
  state_->texts_of_layer[layer] += 1;
  state_->tokens_of_layer[layer] += num_tokens;
  return absl::OkStatus();
}

void StatisticsCollector::State::AddHead(uint32_t layer,
                                         size_t kv_head,
                                         const TokenRows& queries,
                                         const TokenRows& keys,
                                         const TokenRows& values) {
  const size_t block = size_t{layer} * keys.num_heads + kv_head;
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
  AddTo(moment, sums.query_moment.data() + block * keys.dim * keys.dim);
  AddTo(Vector(query_sum / num_rows), sums.query_mean.data() + block * keys.dim);

  const Matrix key_rows = HeadRows(keys, kv_head, 0);
  const Eigen::Index num_late = key_rows.rows() - Index(Statistics::kFirstKeyToken);
  const Matrix late_keys = key_rows.bottomRows(num_late);
  AddTo(Vector(late_keys.colwise().mean()), sums.key_mean.data() + block * keys.dim);
  AddTo(Matrix(Gram(late_keys) / static_cast<double>(num_late)),
        sums.key_moment.data() + block * keys.dim * keys.dim);

  const Matrix value_rows = HeadRows(values, kv_head, 0);
  const Matrix late_values = value_rows.bottomRows(num_late);
  const size_t values_at = block * values.dim * values.dim;
  AddTo(Vector(late_values.colwise().mean()), sums.value_mean.data() + block * values.dim);
  AddTo(Matrix(Gram(late_values) / static_cast<double>(num_late)),
        sums.value_moment.data() + values_at);
  // Rounding may take a weight that should be zero below it.
  const Vector energy = (key_rows * moment).cwiseProduct(key_rows).rowwise().sum().cwiseMax(0.0);
  AddTo(WeightedGram(value_rows, energy), sums.value_covariance.data() + values_at);
  const std::vector<double> mass =
      calibrate::HistoryMass(queries, keys, kv_head, options.attention_windows[layer]);
  AddTo(WeightedGram(value_rows, Eigen::Map<const Vector>(mass.data(), Index(mass.size()))),
        sums.value_attention_covariance.data() + values_at);
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
  Statistics statistics;
  statistics.model = state_->options.model;
  statistics.geometry = state_->options.geometry;
  statistics.num_query_heads = state_->options.num_query_heads;
  statistics.num_texts = num_texts;
  statistics.num_tokens = state_->tokens_of_layer[0];
  statistics.attention_windows = state_->options.attention_windows;
  for (const Moment& moment : kMoments) {
    statistics.*moment.member = state_->sums.*moment.member;
    for (double& x : statistics.*moment.member) {
      x /= static_cast<double>(num_texts);
    }
  }
  for (size_t layer = 0; layer < state_->reservoirs.size(); ++layer) {
    if (!state_->reservoirs[layer].AppendTo(&statistics.reservoir)) {
      return absl::FailedPreconditionError(
          absl::StrCat("statistics: layer ", layer,
                       " has seen texts of other lengths than layer 0; give each layer the same "
                       "texts in the same order"));
    }
  }
  return statistics;
}

}  // namespace crumb
