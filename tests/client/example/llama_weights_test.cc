// SPDX-License-Identifier: Apache-2.0
#include "client/example/llama_weights.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tests/client/example/tiny_llama.h"

namespace crumb::example {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

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
