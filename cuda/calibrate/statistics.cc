// SPDX-License-Identifier: Apache-2.0
#include "crumb/cuda/statistics.h"

#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"

#include "cuda/profile/file_metadata.h"
#include "cuda/profile/safetensors.h"
#include "proto/base/file.h"
#include "proto/base/status_macros.h"

namespace crumb {
namespace {

constexpr char kFormat[] = "crumb.statistics.v2";
constexpr char kNumQueryHeadsKey[] = "num_query_heads";
constexpr char kNumTextsKey[] = "num_texts";
constexpr char kNumTokensKey[] = "num_tokens";
constexpr char kQueryMoment[] = "query_moment";
constexpr char kQueryMean[] = "query_mean";
constexpr char kValueCovariance[] = "value_covariance";
constexpr char kKeyMean[] = "key_mean";
constexpr char kKeyMoment[] = "key_moment";

constexpr uint64_t kMaxQueryHeads = 4096;
// Of the largest element of the diagonal: what summing in another order may leave.
constexpr double kAsymmetryLimit = 1e-6;

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

absl::Status CheckSecondMoments(const char* tensor,
                                const Geometry& geometry,
                                size_t dim,
                                const std::vector<double>& matrices) {
  for (uint32_t block = 0; block < geometry.NumHeadBlocks(); ++block) {
    CRUMB_RETURN_IF_ERROR(CheckSecondMoment({.tensor = tensor,
                                             .layer = block / geometry.num_kv_heads,
                                             .kv_head = block % geometry.num_kv_heads,
                                             .dim = dim},
                                            matrices.data() + block * dim * dim));
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

absl::Status CheckSize(const char* name, size_t size, size_t expected) {
  if (size != expected) {
    return Refuse(name, " has ", size, " values; its geometry asks for ", expected);
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
  const Geometry& geometry = statistics.geometry;
  const uint64_t layers = geometry.num_layers;
  const uint64_t heads = geometry.num_kv_heads;
  const uint64_t key_dim = geometry.key_dim;
  const uint64_t value_dim = geometry.value_dim;
  CRUMB_ASSIGN_OR_RETURN(statistics.query_moment,
                         Take(kQueryMoment, {layers, heads, key_dim, key_dim}, &contents));
  CRUMB_ASSIGN_OR_RETURN(statistics.value_covariance,
                         Take(kValueCovariance, {layers, heads, value_dim, value_dim}, &contents));
  CRUMB_ASSIGN_OR_RETURN(statistics.query_mean,
                         Take(kQueryMean, {layers, heads, key_dim}, &contents));
  CRUMB_ASSIGN_OR_RETURN(statistics.key_mean, Take(kKeyMean, {layers, heads, key_dim}, &contents));
  CRUMB_ASSIGN_OR_RETURN(statistics.key_moment,
                         Take(kKeyMoment, {layers, heads, key_dim, key_dim}, &contents));
  if (!contents.tensors.empty()) {
    const auto& [name, tensor] = *contents.tensors.begin();
    return Refuse("tensor '", Printable(name), "' ", ShapeText(tensor.shape),
                  " has no place in statistics");
  }
  CRUMB_RETURN_IF_ERROR(
      CheckSecondMoments(kQueryMoment, geometry, key_dim, statistics.query_moment));
  CRUMB_RETURN_IF_ERROR(CheckSecondMoments(kKeyMoment, geometry, key_dim, statistics.key_moment));
  CRUMB_RETURN_IF_ERROR(
      CheckSecondMoments(kValueCovariance, geometry, value_dim, statistics.value_covariance));
  return statistics;
}

absl::StatusOr<std::vector<std::byte>> Statistics::Serialize(const Statistics& statistics) {
  const Geometry& geometry = statistics.geometry;
  if (!geometry.IsValid()) {
    return Refuse("the geometry is not valid");
  }
  const uint64_t layers = geometry.num_layers;
  const uint64_t heads = geometry.num_kv_heads;
  const uint64_t key_dim = geometry.key_dim;
  const uint64_t value_dim = geometry.value_dim;
  Safetensors contents;
  contents.metadata = {
      {kFormatKey, kFormat},
      {kModelKey, statistics.model},
      {kNumQueryHeadsKey, absl::StrCat(statistics.num_query_heads)},
      {kNumTextsKey, absl::StrCat(statistics.num_texts)},
      {kNumTokensKey, absl::StrCat(statistics.num_tokens)},
  };
  AddGeometry(geometry, &contents.metadata);
  const auto add = [&](const char* name, std::vector<uint64_t> shape,
                       const std::vector<double>& values) {
    size_t count = 1;
    for (const uint64_t extent : shape) {
      count *= extent;
    }
    contents.tensors[name] = {.type = TensorType::kF64,
                              .shape = std::move(shape),
                              .data = std::as_bytes(std::span(values))};
    return CheckSize(name, values.size(), count);
  };
  CRUMB_RETURN_IF_ERROR(
      add(kQueryMoment, {layers, heads, key_dim, key_dim}, statistics.query_moment));
  CRUMB_RETURN_IF_ERROR(
      add(kValueCovariance, {layers, heads, value_dim, value_dim}, statistics.value_covariance));
  CRUMB_RETURN_IF_ERROR(add(kQueryMean, {layers, heads, key_dim}, statistics.query_mean));
  CRUMB_RETURN_IF_ERROR(add(kKeyMean, {layers, heads, key_dim}, statistics.key_mean));
  CRUMB_RETURN_IF_ERROR(add(kKeyMoment, {layers, heads, key_dim, key_dim}, statistics.key_moment));
  std::vector<std::byte> file = SerializeSafetensors(contents);
  // The reader's checks are the checks.
  CRUMB_RETURN_IF_ERROR(Parse(file).status());
  return file;
}

}  // namespace crumb
