// SPDX-License-Identifier: Apache-2.0
#include "client/example/llama_weights.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

#include "tests/client/example/gguf_builder.h"

namespace crumb::example {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// One layer, embedding 64, two query heads and one KV head of 32, feed-forward 96, three tokens.
struct TinyLlama {
  std::string architecture = "llama";
  uint32_t num_heads = 2;
  uint32_t num_kv_heads = 1;
  uint32_t rope_dims = 32;
  std::string without;  // A tensor to leave out.
  std::string extra;    // A tensor to add.
  uint64_t down_columns = 96;

  std::string Build() const {
    GgufBuilder builder;
    builder.Key("general.architecture", architecture)
        .Key("llama.block_count", uint32_t{1})
        .Key("llama.embedding_length", uint32_t{64})
        .Key("llama.attention.head_count", num_heads)
        .Key("llama.attention.head_count_kv", num_kv_heads)
        .Key("llama.rope.dimension_count", rope_dims)
        .Key("llama.feed_forward_length", uint32_t{96})
        .Key("llama.context_length", uint32_t{128})
        .Key("llama.rope.freq_base", 10000.0f)
        .Key("llama.attention.layer_norm_rms_epsilon", 1e-5f)
        .Key("tokenizer.ggml.tokens", std::vector<std::string>{"a", "b", "c"});
    const auto add = [&](const std::string& name, const std::vector<uint64_t>& dims, float value) {
      if (name != without) {
        const uint64_t count = dims.size() == 1 ? dims[0] : dims[0] * dims[1];
        builder.FloatTensor(name, dims, std::vector<float>(count, value));
      }
    };
    add("token_embd.weight", {64, 3}, 1);
    add("output_norm.weight", {64}, 2);
    add("blk.0.attn_norm.weight", {64}, 3);
    add("blk.0.attn_q.weight", {64, 64}, 4);
    add("blk.0.attn_k.weight", {64, 32}, 5);
    add("blk.0.attn_v.weight", {64, 32}, 6);
    add("blk.0.attn_output.weight", {64, 64}, 7);
    add("blk.0.ffn_norm.weight", {64}, 8);
    add("blk.0.ffn_gate.weight", {64, 96}, 9);
    add("blk.0.ffn_up.weight", {64, 96}, 10);
    add("blk.0.ffn_down.weight", {down_columns, 64}, 11);
    if (!extra.empty()) {
      add(extra, {64}, 12);
    }
    return builder.Build();
  }
};

class LlamaWeightsTest : public ::testing::Test {
 protected:
  void TearDown() override { std::filesystem::remove(path_); }

  absl::StatusOr<LlamaWeights> Read(const TinyLlama& llama) {
    std::ofstream(path_, std::ios::binary) << llama.Build();
    file_ = *GgufFile::Open(path_);
    const absl::StatusOr<LlamaConfig> config = LlamaConfig::FromGguf(*file_);
    if (!config.ok()) {
      return config.status();
    }
    config_ = *config;
    return LlamaWeights::FromGguf(*file_, config_);
  }
  std::string ErrorOf(const TinyLlama& llama) {
    const auto weights = Read(llama);
    return weights.ok() ? "accepted" : std::string(weights.status().message());
  }

  const std::filesystem::path path_ =
      std::filesystem::path(::testing::TempDir()) / "llama_weights_test.gguf";
  std::unique_ptr<GgufFile> file_;
  LlamaConfig config_;
};

TEST_F(LlamaWeightsTest, StacksMatricesThatReadTheSameInput) {
  const auto weights = Read({});
  ASSERT_TRUE(weights.ok()) << weights.status();
  EXPECT_EQ(config_.head_dim, 32u);
  EXPECT_EQ(config_.geometry(), (Geometry{1, 1, 32, 32}));
  const Matrix& stacked = weights->layers[0].query_key_value;
  EXPECT_EQ(stacked.rows, 128u);
  EXPECT_EQ(stacked.columns, 64u);
  EXPECT_EQ(stacked.data[63 * 64], 4);   // The last row of queries,
  EXPECT_EQ(stacked.data[64 * 64], 5);   // the first of keys,
  EXPECT_EQ(stacked.data[127 * 64], 6);  // the last of values.
  EXPECT_EQ(weights->layers[0].gate_up.rows, 192u);
}

TEST_F(LlamaWeightsTest, TiesTheOutputToTheEmbeddingWhereItHasNone) {
  const auto weights = Read({});
  ASSERT_TRUE(weights.ok());
  EXPECT_EQ(&weights->output_or_tied(), &weights->token_embedding);
}

TEST_F(LlamaWeightsTest, RefusesOtherArchitecturesByName) {
  TinyLlama llama;
  llama.architecture = "mamba";
  EXPECT_THAT(ErrorOf(llama), HasSubstr("architecture mamba"));
}

TEST_F(LlamaWeightsTest, NamesWhatDoesNotFitTogether) {
  TinyLlama heads;
  heads.num_kv_heads = 3;
  EXPECT_THAT(ErrorOf(heads), HasSubstr("2 query heads"));
  TinyLlama narrow;
  narrow.num_heads = 8;
  narrow.rope_dims = 8;
  EXPECT_THAT(ErrorOf(narrow), HasSubstr("head_dim 8"));
  TinyLlama partial;
  partial.rope_dims = 16;
  EXPECT_THAT(ErrorOf(partial), HasSubstr("rope.dimension_count is 16"));
}

TEST_F(LlamaWeightsTest, NamesTheTensorThatIsWrong) {
  TinyLlama missing;
  missing.without = "blk.0.ffn_up.weight";
  EXPECT_THAT(ErrorOf(missing), HasSubstr("no tensor blk.0.ffn_up"));
  TinyLlama more;
  more.extra = "blk.0.attn_q.bias";
  EXPECT_THAT(ErrorOf(more), HasSubstr("blk.0.attn_q.bias"));
  TinyLlama other;
  other.down_columns = 64;
  EXPECT_THAT(ErrorOf(other),
              AllOf(HasSubstr("blk.0.ffn_down.weight"), HasSubstr("[64, 64], expected [96, 64]")));
}

}  // namespace
}  // namespace crumb::example
