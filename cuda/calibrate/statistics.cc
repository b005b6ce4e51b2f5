// SPDX-License-Identifier: Apache-2.0
#include "crumb/cuda/statistics.h"

#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"

#include "cuda/calibrate/reservoir_file.h"
#include "cuda/profile/file_metadata.h"
#include "cuda/profile/safetensors.h"
#include "proto/base/file.h"
#include "proto/base/status_macros.h"

#include <Eigen/Cholesky>
#include <Eigen/Dense>

namespace crumb {
namespace {

constexpr char kFormat[] = "crumb.statistics.v3";
constexpr char kNumQueryHeadsKey[] = "num_query_heads";
constexpr char kNumTextsKey[] = "num_texts";
constexpr char kNumTokensKey[] = "num_tokens";
constexpr char kAttentionWindows[] = "attention_windows";

// The F64 tensors [L, H, dim] and [L, H, dim, dim].
struct Moment {
  const char* tensor;
  std::vector<double> Statistics::*member;
  bool is_of_keys;  // Of key_dim channels, not value_dim.
  // Second moments alone: the mean of the same rows, if there is one, else nullptr.
  bool is_second;
  std::vector<double> Statistics::*mean;
};

constexpr Moment kMoments[] = {
    {"query_moment", &Statistics::query_moment, true, true, &Statistics::query_mean},
    {"query_mean", &Statistics::query_mean, true, false, nullptr},
    {"key_moment", &Statistics::key_moment, true, true, &Statistics::key_mean},
    {"key_mean", &Statistics::key_mean, true, false, nullptr},
    {"value_moment", &Statistics::value_moment, false, true, &Statistics::value_mean},
    {"value_mean", &Statistics::value_mean, false, false, nullptr},
    {"value_covariance", &Statistics::value_covariance, false, true, nullptr},
    {"value_attention_covariance", &Statistics::value_attention_covariance, false, true, nullptr},
};

std::vector<uint64_t> ShapeOf(const Moment& moment, const Geometry& geometry) {
  const uint64_t dim = moment.is_of_keys ? geometry.key_dim : geometry.value_dim;
  std::vector<uint64_t> shape = {geometry.num_layers, geometry.num_kv_heads, dim};
  if (moment.is_second) {
    shape.push_back(dim);
  }
  return shape;
}

constexpr uint64_t kMaxQueryHeads = 4096;
// Of the largest element of the diagonal: what summing in another order may leave.
constexpr double kAsymmetryLimit = 1e-6;
// Of the mean of the diagonal: how far below zero rounding may leave an eigenvalue.
constexpr double kNegativeLimit = 1e-6;

template <typename... Parts>
absl::Status Refuse(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat("statistics: ", parts...));
}

struct MatrixName {
  const char* tensor;
  uint32_t layer;
  uint32_t kv_head;
  size_t dim;
};

std::string Text(const MatrixName& name) {
  return absl::StrCat("tensor '", name.tensor, "', layer ", name.layer, ", KV head ", name.kv_head,
                      " [", name.dim, ", ", name.dim, "]");
}

absl::Status CheckSecondMoment(const MatrixName& name, const double* matrix) {
  const size_t dim = name.dim;
  double largest = 0;
  for (size_t i = 0; i < dim; ++i) {
    if (matrix[i * dim + i] < 0) {
      return Refuse(Text(name), ": element ", i, " of the diagonal is ", matrix[i * dim + i],
                    "; a mean of squares is at least 0");
    }
    largest = std::max(largest, matrix[i * dim + i]);
  }
  for (size_t i = 0; i < dim; ++i) {
    for (size_t j = 0; j < i; ++j) {
      const double difference = std::abs(matrix[i * dim + j] - matrix[j * dim + i]);
      if (difference > kAsymmetryLimit * largest) {
        return Refuse(Text(name), " is not symmetric: elements (", i, ", ", j, ") and (", j, ", ",
                      i, ") differ by ", difference, "; at most ", kAsymmetryLimit * largest,
                      " is allowed");
      }
    }
  }
  return absl::OkStatus();
}

// The second moment less that of the mean, whose eigenvalues cannot be negative.
absl::Status CheckPositive(const MatrixName& name, const double* moment, const double* mean) {
  using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const auto dim = static_cast<Eigen::Index>(name.dim);
  Matrix covariance = Eigen::Map<const Matrix>(moment, dim, dim);
  const double allowed = kNegativeLimit * covariance.diagonal().mean();
  if (mean != nullptr) {
    const Eigen::Map<const Eigen::VectorXd> row(mean, dim);
    covariance -= row * row.transpose();
  }
  covariance.diagonal().array() += allowed;
  if (allowed > 0 && Eigen::LLT<Matrix>(covariance).info() != Eigen::Success) {
    return Refuse(Text(name), mean == nullptr ? "" : ", less that of its mean,",
                  " has an eigenvalue below -", allowed,
                  "; a covariance has none below 0. Collect the statistics again");
  }
  return absl::OkStatus();
}

absl::Status CheckSecondMoments(const Moment& moment, const Statistics& statistics) {
  const Geometry& geometry = statistics.geometry;
  const size_t dim = moment.is_of_keys ? geometry.key_dim : geometry.value_dim;
  for (uint32_t block = 0; block < geometry.NumHeadBlocks(); ++block) {
    const MatrixName name{.tensor = moment.tensor,
                          .layer = block / geometry.num_kv_heads,
                          .kv_head = block % geometry.num_kv_heads,
                          .dim = dim};
    const double* matrix = (statistics.*moment.member).data() + block * dim * dim;
    CRUMB_RETURN_IF_ERROR(CheckSecondMoment(name, matrix));
    CRUMB_RETURN_IF_ERROR(CheckPositive(
        name, matrix,
        moment.mean == nullptr ? nullptr : (statistics.*moment.mean).data() + block * dim));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<double>> Take(const char* name,
                                         const std::vector<uint64_t>& shape,
                                         Safetensors* contents) {
  const auto node = contents->tensors.extract(name);
  if (node.empty()) {
    return Refuse("tensor '", name, "' is missing; F64 ", ShapeText(shape), " is expected");
  }
  const Tensor& tensor = node.mapped();
  // Sized by what is in the file, not by what its metadata promises.
  std::vector<double> values(tensor.data.size() / sizeof(double));
  if (tensor.type != TensorType::kF64 || tensor.shape != shape) {
    return Refuse("tensor '", name, "' is ", std::string(TensorTypeName(tensor.type)), " ",
                  ShapeText(tensor.shape), ", expected F64 ", ShapeText(shape));
  }
  CRUMB_RETURN_IF_ERROR(CopyF64(name, tensor, shape, values));
  return values;
}

absl::Status ReadMetadata(const MetadataReader& metadata, Statistics* statistics) {
  CRUMB_RETURN_IF_ERROR(metadata.CheckFormat(kFormat));
  CRUMB_ASSIGN_OR_RETURN(statistics->model, metadata.Model());
  CRUMB_ASSIGN_OR_RETURN(statistics->geometry, metadata.ReadGeometry());
  CRUMB_ASSIGN_OR_RETURN(const uint64_t query_heads,
                         metadata.Number(kNumQueryHeadsKey, 1, kMaxQueryHeads));
  if (query_heads % statistics->geometry.num_kv_heads != 0) {
    return Refuse("metadata 'num_query_heads' is ", query_heads, "; it must be a multiple of the ",
                  statistics->geometry.num_kv_heads, " KV heads");
  }
  statistics->num_query_heads = static_cast<uint32_t>(query_heads);
  constexpr uint64_t kAny = std::numeric_limits<uint64_t>::max();
  CRUMB_ASSIGN_OR_RETURN(statistics->num_texts, metadata.Number(kNumTextsKey, 1, kAny));
  CRUMB_ASSIGN_OR_RETURN(statistics->num_tokens, metadata.Number(kNumTokensKey, 1, kAny));
  return absl::OkStatus();
}

absl::Status ReadWindows(Safetensors* contents, Statistics* statistics) {
  const uint64_t num_layers = statistics->geometry.num_layers;
  CRUMB_ASSIGN_OR_RETURN(const std::vector<double> windows,
                         Take(kAttentionWindows, {num_layers}, contents));
  for (const double window : windows) {
    if (!calibrate::IsCount(window)) {
      return Refuse("tensor '", kAttentionWindows, "': ", window,
                    " is not a number of tokens; whole numbers below 2^32 are");
    }
    statistics->attention_windows.push_back(static_cast<uint32_t>(window));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Statistics> Statistics::Load(const std::filesystem::path& path) {
  CRUMB_ASSIGN_OR_RETURN(const std::vector<std::byte> file, ReadFile(path, kMaxFileBytes));
  auto statistics = Parse(file);
  if (!statistics.ok()) {
    return absl::Status(statistics.status().code(),
                        absl::StrCat(path.string(), ": ", statistics.status().message()));
  }
  return statistics;
}

absl::StatusOr<Statistics> Statistics::Parse(std::span<const std::byte> file) {
  CRUMB_ASSIGN_OR_RETURN(Safetensors contents, ParseSafetensors(file));
  Statistics statistics;
  CRUMB_RETURN_IF_ERROR(ReadMetadata(MetadataReader("statistics", contents.metadata), &statistics));
  for (const Moment& moment : kMoments) {
    CRUMB_ASSIGN_OR_RETURN(statistics.*moment.member,
                           Take(moment.tensor, ShapeOf(moment, statistics.geometry), &contents));
  }
  CRUMB_RETURN_IF_ERROR(ReadWindows(&contents, &statistics));
  CRUMB_RETURN_IF_ERROR(
      calibrate::ReadReservoir(statistics.geometry, &contents, &statistics.reservoir));
  if (!contents.tensors.empty()) {
    const auto& [name, tensor] = *contents.tensors.begin();
    return Refuse("tensor '", Printable(name), "' ", ShapeText(tensor.shape),
                  " has no place in statistics");
  }
  for (const Moment& moment : kMoments) {
    if (moment.is_second) {
      CRUMB_RETURN_IF_ERROR(CheckSecondMoments(moment, statistics));
    }
  }
  return statistics;
}

absl::StatusOr<std::vector<std::byte>> Statistics::Serialize(const Statistics& statistics) {
  const Geometry& geometry = statistics.geometry;
  if (!geometry.IsValid()) {
    return Refuse("the geometry is not valid");
  }
  Safetensors contents;
  contents.metadata = {
      {kFormatKey, kFormat},
      {kModelKey, statistics.model},
      {kNumQueryHeadsKey, absl::StrCat(statistics.num_query_heads)},
      {kNumTextsKey, absl::StrCat(statistics.num_texts)},
      {kNumTokensKey, absl::StrCat(statistics.num_tokens)},
  };
  AddGeometry(geometry, &contents.metadata);
  for (const Moment& moment : kMoments) {
    CRUMB_RETURN_IF_ERROR(calibrate::Add(moment.tensor, TensorType::kF64, ShapeOf(moment, geometry),
                                         std::as_bytes(std::span(statistics.*moment.member)),
                                         &contents));
  }
  const std::vector<double> windows(statistics.attention_windows.begin(),
                                    statistics.attention_windows.end());
  CRUMB_RETURN_IF_ERROR(calibrate::Add(kAttentionWindows, TensorType::kF64, {geometry.num_layers},
                                       std::as_bytes(std::span(windows)), &contents));
  const calibrate::ReservoirTokens tokens(statistics.reservoir);
  CRUMB_RETURN_IF_ERROR(calibrate::AddReservoir(geometry, statistics.reservoir, tokens, &contents));
  std::vector<std::byte> file = SerializeSafetensors(contents);
  // The reader's checks are the checks.
  CRUMB_RETURN_IF_ERROR(Parse(file).status());
  return file;
}

}  // namespace crumb
