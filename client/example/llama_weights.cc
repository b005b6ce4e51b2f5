// SPDX-License-Identifier: Apache-2.0
#include "client/example/llama_weights.h"

#include <initializer_list>
#include <set>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "proto/base/status_macros.h"
#include "proto/page/page_format.h"

namespace crumb::example {
namespace {

// More than any model of this family has; bounds what a product of two of them can be.
constexpr uint32_t kMaxDim = 1u << 20;

absl::Status Malformed(const GgufFile& file, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(file.path().string(), ": ", what));
}

absl::Status CheckConfig(const GgufFile& file, const LlamaConfig& config) {
  if (config.num_heads % config.num_kv_heads != 0) {
    return Malformed(file, absl::StrCat(config.num_heads, " query heads are not a multiple of ",
                                        config.num_kv_heads, " KV heads"));
  }
  if (!IsValidHeadDim(config.head_dim)) {
    return Malformed(file, absl::StrCat("head_dim ", config.head_dim,
                                        " must be a multiple of 32 and at most ", kMaxHeadDim));
  }
  if (!(config.rope_base > 1) || !(config.norm_epsilon > 0)) {
    return Malformed(file, absl::StrCat("RoPE base ", config.rope_base, " must exceed 1 and norm ",
                                        "epsilon ", config.norm_epsilon, " must exceed 0"));
  }
  return absl::OkStatus();
}

// Takes tensors out of a file one by one and knows which were left.
class WeightReader {
 public:
  explicit WeightReader(const GgufFile& file) : file_(file) {}

  absl::StatusOr<std::vector<float>> ReadVector(const std::string& name, uint32_t size) {
    std::vector<float> values;
    CRUMB_RETURN_IF_ERROR(Append(name, {size}, values));
    return values;
  }

  // Matrices of equal width, one above the other.
  absl::StatusOr<Matrix> ReadStacked(
      std::initializer_list<std::pair<std::string, uint32_t>> names_and_rows, uint32_t columns) {
    Matrix matrix;
    matrix.columns = columns;
    for (const auto& [name, rows] : names_and_rows) {
      CRUMB_RETURN_IF_ERROR(Append(name, {columns, rows}, matrix.data));
      matrix.rows += rows;
    }
    return matrix;
  }

  bool Has(const std::string& name) const { return file_.FindTensor(name) != nullptr; }

  absl::Status ExpectAllTaken() const {
    for (const auto& [name, tensor] : file_.tensors()) {
      if (!taken_.contains(name)) {
        return Malformed(file_, absl::StrCat("tensor ", name, " is not part of a plain Llama ",
                                             "model; this engine would leave it out"));
      }
    }
    return absl::OkStatus();
  }

 private:
  absl::Status Append(const std::string& name,
                      const std::vector<uint64_t>& dims,
                      std::vector<float>& values) {
    const GgufTensor* tensor = file_.FindTensor(name);
    if (tensor == nullptr) {
      return Malformed(file_, absl::StrCat("no tensor ", name));
    }
    if (tensor->dims != dims) {
      return Malformed(
          file_, absl::StrCat("tensor ", name, " has shape [", absl::StrJoin(tensor->dims, ", "),
                              "], expected [", absl::StrJoin(dims, ", "), "]"));
    }
    taken_.insert(name);
    const size_t start = values.size();
    values.resize(start + tensor->num_columns() * tensor->num_rows());
    Dequantize(tensor->type, tensor->bytes, std::span(values).subspan(start));
    return absl::OkStatus();
  }

  const GgufFile& file_;
  std::set<std::string, std::less<>> taken_;
};

absl::StatusOr<LlamaLayer> ReadLayer(WeightReader& reader, const LlamaConfig& c, uint32_t index) {
  const auto name = [index](absl::string_view part) {
    return absl::StrCat("blk.", index, ".", part, ".weight");
  };
  LlamaLayer layer;
  CRUMB_ASSIGN_OR_RETURN(layer.attention_norm,
                         reader.ReadVector(name("attn_norm"), c.embedding_dim));
  CRUMB_ASSIGN_OR_RETURN(layer.query_key_value, reader.ReadStacked({{name("attn_q"), c.query_dim()},
                                                                    {name("attn_k"), c.kv_dim()},
                                                                    {name("attn_v"), c.kv_dim()}},
                                                                   c.embedding_dim));
  CRUMB_ASSIGN_OR_RETURN(
      layer.attention_output,
      reader.ReadStacked({{name("attn_output"), c.embedding_dim}}, c.query_dim()));
  CRUMB_ASSIGN_OR_RETURN(layer.feed_forward_norm,
                         reader.ReadVector(name("ffn_norm"), c.embedding_dim));
  CRUMB_ASSIGN_OR_RETURN(layer.gate_up, reader.ReadStacked({{name("ffn_gate"), c.feed_forward_dim},
                                                            {name("ffn_up"), c.feed_forward_dim}},
                                                           c.embedding_dim));
  CRUMB_ASSIGN_OR_RETURN(
      layer.down, reader.ReadStacked({{name("ffn_down"), c.embedding_dim}}, c.feed_forward_dim));
  return layer;
}

}  // namespace

absl::StatusOr<LlamaConfig> LlamaConfig::FromGguf(const GgufFile& file) {
  CRUMB_ASSIGN_OR_RETURN(const std::string architecture, file.GetString("general.architecture"));
  if (architecture != "llama") {
    return Malformed(file,
                     absl::StrCat("architecture ", architecture, " is not known here, only llama"));
  }
  if (file.HasKey("llama.rope.scaling.type")) {
    CRUMB_ASSIGN_OR_RETURN(const std::string scaling, file.GetString("llama.rope.scaling.type"));
    if (scaling != "none") {
      return Malformed(file, absl::StrCat("RoPE scaling ", scaling, " is not known here"));
    }
  }
  LlamaConfig config;
  CRUMB_ASSIGN_OR_RETURN(config.num_layers,
                         file.GetUint("llama.block_count", 1, Geometry::kMaxLayers));
  CRUMB_ASSIGN_OR_RETURN(config.embedding_dim, file.GetUint("llama.embedding_length", 1, kMaxDim));
  CRUMB_ASSIGN_OR_RETURN(config.num_heads, file.GetUint("llama.attention.head_count", 1, 1024));
  CRUMB_ASSIGN_OR_RETURN(config.num_kv_heads,
                         file.GetUint("llama.attention.head_count_kv", 1, Geometry::kMaxKvHeads));
  CRUMB_ASSIGN_OR_RETURN(config.feed_forward_dim,
                         file.GetUint("llama.feed_forward_length", 1, kMaxDim));
  CRUMB_ASSIGN_OR_RETURN(config.context_length, file.GetUint("llama.context_length", 1, 1u << 30));
  CRUMB_ASSIGN_OR_RETURN(config.rope_base, file.GetFloat("llama.rope.freq_base"));
  CRUMB_ASSIGN_OR_RETURN(config.norm_epsilon,
                         file.GetFloat("llama.attention.layer_norm_rms_epsilon"));
  CRUMB_ASSIGN_OR_RETURN(const auto tokens, file.GetStrings("tokenizer.ggml.tokens"));
  config.vocabulary_size = static_cast<uint32_t>(tokens.size());
  config.head_dim = config.embedding_dim / config.num_heads;
  if (file.HasKey("llama.attention.key_length")) {
    CRUMB_ASSIGN_OR_RETURN(config.head_dim,
                           file.GetUint("llama.attention.key_length", 1, kMaxHeadDim));
  }
  if (file.HasKey("llama.rope.dimension_count")) {
    CRUMB_RETURN_IF_ERROR(
        file.GetUint("llama.rope.dimension_count", config.head_dim, config.head_dim).status());
  }
  CRUMB_RETURN_IF_ERROR(CheckConfig(file, config));
  return config;
}

absl::StatusOr<LlamaWeights> LlamaWeights::FromGguf(const GgufFile& file,
                                                    const LlamaConfig& config) {
  WeightReader reader(file);
  LlamaWeights weights;
  CRUMB_ASSIGN_OR_RETURN(
      weights.token_embedding,
      reader.ReadStacked({{"token_embd.weight", config.vocabulary_size}}, config.embedding_dim));
  for (uint32_t index = 0; index < config.num_layers; ++index) {
    CRUMB_ASSIGN_OR_RETURN(LlamaLayer layer, ReadLayer(reader, config, index));
    weights.layers.push_back(std::move(layer));
  }
  CRUMB_ASSIGN_OR_RETURN(weights.output_norm,
                         reader.ReadVector("output_norm.weight", config.embedding_dim));
  if (reader.Has("output.weight")) {
    CRUMB_ASSIGN_OR_RETURN(
        weights.output,
        reader.ReadStacked({{"output.weight", config.vocabulary_size}}, config.embedding_dim));
  }
  if (reader.Has("rope_freqs.weight")) {
    CRUMB_ASSIGN_OR_RETURN(weights.rope_factors,
                           reader.ReadVector("rope_freqs.weight", config.head_dim / 2));
  }
  CRUMB_RETURN_IF_ERROR(reader.ExpectAllTaken());
  return weights;
}

}  // namespace crumb::example
