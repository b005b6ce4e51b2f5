// SPDX-License-Identifier: Apache-2.0
//
// What calibration needs to know of a model's attention, collected while it reads a few texts and
// kept in a file, so that a profile can be fitted again and again without the model.
//
// Per layer and KV head, each the mean over texts of the text's own value (so that a long text does
// not outweigh a short one):
//   query moment       E[q q^T] over all query heads that share the KV head, positions from
//                      kFirstQueryToken on: what an error of a key is measured by
//   query mean         E[q] of the same queries
//   value covariance   E[w v v^T] with w = k M k^T, M the text's query moment, scaled to a mean of
//                      one: values, weighted by how much attention their keys can get
//   key mean           E[k], positions from kFirstKeyToken on
//   key moment         E[k k^T] of the same keys: with the mean, their scatter
//   value mean, value moment   E[v] and E[v v^T], positions from kFirstKeyToken on
//   value attention covariance E[w v v^T], w the attention that a value gets as history, scaled to
//   a
//                      mean of one: the sum of its probabilities under every kAttentionStride-th
//                      query from position kFirstQueryToken on, of keys at least kFirstQueryToken
//                      before the query and at or after kFirstKeyToken
// and a reservoir of rows, see reservoir.h.
// Queries and keys are as attention sees them, after RoPE and any normalisation, queries so scaled
// that scores are q . k / sqrt(key_dim).
//
// File: safetensors with metadata format = "crumb.statistics.v3", model, num_layers, num_kv_heads,
// num_query_heads, key_dim, value_dim, num_texts, num_tokens; the F64 tensors below; and unless the
// reservoir is empty, reservoir.key_tokens and reservoir.query_tokens, F64 [R, 2] of whole numbers
// (text, position), and F32 reservoir.keys, .values, .queries, .outputs and .lse.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "crumb/cuda/reservoir.h"
#include "proto/page/geometry.h"

namespace crumb {

struct Statistics {
  // Rows before these stay in BF16 in any use, or are seen by too few: the sink, and queries that
  // have no two-bit history yet.
  static constexpr uint32_t kFirstKeyToken = 64;
  static constexpr uint32_t kFirstQueryToken = 256;
  static constexpr uint32_t kAttentionStride = 16;
  static constexpr size_t kMaxFileBytes = size_t{1} << 30;

  std::string model;  // For people.
  Geometry geometry;
  uint32_t num_query_heads = 0;  // A multiple of geometry.num_kv_heads.
  uint64_t num_texts = 0;
  uint64_t num_tokens = 0;                         // Over all texts.
  std::vector<double> query_moment;                // [L, H, dk, dk]
  std::vector<double> query_mean;                  // [L, H, dk]
  std::vector<double> value_covariance;            // [L, H, dv, dv]
  std::vector<double> key_mean;                    // [L, H, dk]
  std::vector<double> key_moment;                  // [L, H, dk, dk]
  std::vector<double> value_mean;                  // [L, H, dv]
  std::vector<double> value_moment;                // [L, H, dv, dv]
  std::vector<double> value_attention_covariance;  // [L, H, dv, dv]
  // [L]: how many keys a query of the layer sees, itself included; 0: all before it.
  std::vector<uint32_t> attention_windows;
  Reservoir reservoir;

  // INVALID_ARGUMENT names the field or tensor, its shape and the limit: malformed or truncated
  // file, another format, impossible geometry, NaN or infinity, a second moment that is not
  // symmetric or not positive (also less the mean's), no texts, more tokens in the reservoir than
  // it has room for or out of order. NOT_FOUND: no such file.
  static absl::StatusOr<Statistics> Load(const std::filesystem::path& path);
  static absl::StatusOr<Statistics> Parse(std::span<const std::byte> file);
  // The file that holds these, after the same checks. Deterministic.
  static absl::StatusOr<std::vector<std::byte>> Serialize(const Statistics& statistics);
};

// Gathers statistics text by text, in memory that does not grow with them. Thread-compatible: the
// layers of one text may be added from different threads only under a lock.
class StatisticsCollector {
 public:
  struct Options {
    std::string model;
    Geometry geometry;
    uint32_t num_query_heads = 0;
    // As Statistics::attention_windows; empty: all layers see all keys.
    std::vector<uint32_t> attention_windows = {};
    uint64_t seed = 1;  // Of the reservoir.
  };

  // INVALID_ARGUMENT: windows of another number of layers, a geometry that is not valid, or query
  // heads that KV heads do not divide.
  static absl::StatusOr<StatisticsCollector> Create(Options options);
  // A collector that goes on where the one that gave `statistics` was: what is added next counts as
  // if it had been added there, but for the rounding of a division and a product. `seed` is that
  // collector's. INVALID_ARGUMENT as Create.
  static absl::StatusOr<StatisticsCollector> Resume(const Statistics& statistics,
                                                    uint64_t seed = 1);
  StatisticsCollector(StatisticsCollector&& other) noexcept;
  StatisticsCollector& operator=(StatisticsCollector&& other) noexcept;
  StatisticsCollector(const StatisticsCollector&) = delete;
  StatisticsCollector& operator=(const StatisticsCollector&) = delete;
  ~StatisticsCollector();

  // One layer of one whole text of T tokens, position 0 first: `queries` [T, Hq, dk], `keys`
  // [T, H, dk] after RoPE, `values` [T, H, dv], dense. INVALID_ARGUMENT: lengths that are not of
  // one T, a T of kFirstQueryToken or less, NaN or infinity (named with token, head and channel);
  // nothing of the layer is added then.
  absl::Status AddText(uint32_t layer,
                       std::span<const float> queries,
                       std::span<const float> keys,
                       std::span<const float> values);

  // The statistics of what was added so far. FAILED_PRECONDITION: no text, or layers that have seen
  // different texts (by number and length).
  absl::StatusOr<Statistics> Finish() const;

 private:
  struct State;
  explicit StatisticsCollector(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace crumb
