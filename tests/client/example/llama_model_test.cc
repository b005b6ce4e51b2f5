// SPDX-License-Identifier: Apache-2.0
//
// The real model against PyTorch transformers on the same file (make_expected.py).
#include "client/example/llama_model.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "client/example/model_profile.h"
#include "client/example/sampler.h"
#include "tests/client/example/expected.h"

namespace crumb::example {
namespace {

// Logits here reach 28. Float sums in another order make a row here and there round the other way
// to bfloat16; over 30 layers that moved the most distant of 49,152 logits by 0.051, between chunk
// sizes on one machine. Twice that, since other processors sum in other orders.
constexpr double kBf16Tolerance = 0.1;
constexpr double kFloatTolerance = 0.3;

// One model for all tests: half a gigabyte of floats.
class LlamaModelTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    if (std::filesystem::exists(ModelPath())) {
      file_ = *GgufFile::Open(ModelPath());
      model_ = *LlamaModel::Load(*file_, /*num_threads=*/2);
    }
  }
  static void TearDownTestSuite() {
    model_.reset();
    file_.reset();
  }
  void SetUp() override {
    if (model_ == nullptr) {
      GTEST_SKIP() << "no model at " << ModelPath() << "; run deploy/fetch-model.sh";
    }
  }

  // A sequence that keeps rows as they are, but for their rounding to bfloat16.
  static std::unique_ptr<Sequence> Bf16Sequence() {
    auto profile = IdentityProfile(model_->config().geometry());
    EXPECT_TRUE(profile.ok()) << profile.status();
    auto sequence = Sequence::Create({.profile = *profile,
                                      .num_query_heads = model_->config().num_heads,
                                      .num_threads = 2,
                                      .keep_all_bf16 = true});
    EXPECT_TRUE(sequence.ok()) << sequence.status();
    return *std::move(sequence);
  }

  // The logits after the last of `tokens`, which are fed `chunk_tokens` at a time.
  static std::vector<float> LogitsAfter(std::span<const uint32_t> tokens,
                                        Sequence& sequence,
                                        size_t chunk_tokens) {
    std::vector<float> logits(model_->config().vocabulary_size);
    const size_t dim = model_->config().embedding_dim;
    for (size_t i = 0; i < tokens.size(); i += chunk_tokens) {
      const auto hidden =
          model_->Forward(tokens.subspan(i, std::min(chunk_tokens, tokens.size() - i)), sequence);
      EXPECT_TRUE(hidden.ok()) << hidden.status();
      model_->Logits(hidden->last(dim), logits);
    }
    return logits;
  }

  static std::unique_ptr<GgufFile> file_;
  static std::unique_ptr<LlamaModel> model_;
};
std::unique_ptr<GgufFile> LlamaModelTest::file_;
std::unique_ptr<LlamaModel> LlamaModelTest::model_;

TEST_F(LlamaModelTest, LogitsAgreeWithTransformers) {
  const nlohmann::json expected = ReadExpected("expected_logits.json");
  ASSERT_GE(expected["prompts"].size(), 4u);
  for (const auto& prompt : expected["prompts"]) {
    const auto tokens = prompt["ids"].get<std::vector<uint32_t>>();
    SCOPED_TRACE(tokens.size());
    const auto sequence = Bf16Sequence();
    const std::vector<float> logits = LogitsAfter(tokens, *sequence, 512);
    EXPECT_EQ(sequence->length(), tokens.size());

    const auto check = [&](const nlohmann::json& top, double tolerance) {
      const auto ids = top["ids"].get<std::vector<size_t>>();
      const auto values = top["logits"].get<std::vector<float>>();
      for (size_t i = 0; i < ids.size(); ++i) {
        EXPECT_NEAR(logits[ids[i]], values[i], tolerance) << "token " << ids[i];
      }
      EXPECT_EQ(std::max_element(logits.begin(), logits.end()) - logits.begin(), ids[0]);
    };
    // Keys and values rounded to bfloat16 there too: what is left is the order of float sums, and
    // a row here and there that rounds the other way.
    check(prompt["bf16"], kBf16Tolerance);
    // All of it in float: what rounding K and V costs.
    check(prompt["float"], kFloatTolerance);
  }
}

TEST_F(LlamaModelTest, ContinuesAsTransformersDoes) {
  const auto prompts = ReadExpected("expected_logits.json")["prompts"];
  for (const auto& prompt : prompts) {
    const auto sequence = Bf16Sequence();
    Sampler greedy = *Sampler::Create({});
    std::vector<uint32_t> next = prompt["ids"].get<std::vector<uint32_t>>();
    for (const uint32_t expected : prompt["greedy"].get<std::vector<uint32_t>>()) {
      next = {greedy.Sample(LogitsAfter(next, *sequence, 512))};
      ASSERT_EQ(next[0], expected);
    }
  }
}

TEST_F(LlamaModelTest, ChunksOfAnySizeGiveTheSameLogits) {
  const auto prompts = ReadExpected("expected_logits.json")["prompts"];
  const auto tokens = prompts[2]["ids"].get<std::vector<uint32_t>>();
  const std::vector<float> whole = LogitsAfter(tokens, *Bf16Sequence(), tokens.size());
  for (const size_t chunk_tokens : {1u, 7u, 64u}) {
    const std::vector<float> pieces = LogitsAfter(tokens, *Bf16Sequence(), chunk_tokens);
    for (size_t i = 0; i < whole.size(); ++i) {
      ASSERT_NEAR(pieces[i], whole[i], kBf16Tolerance) << "token " << i;
    }
  }
}

TEST_F(LlamaModelTest, RefusesATokenBeyondTheVocabulary) {
  const auto sequence = Bf16Sequence();
  const std::vector<uint32_t> tokens = {1, model_->config().vocabulary_size};
  const auto hidden = model_->Forward(tokens, *sequence);
  EXPECT_EQ(hidden.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(hidden.status().message(), ::testing::HasSubstr("token 49152 at index 1"));
  EXPECT_EQ(sequence->length(), 0u);
}

}  // namespace
}  // namespace crumb::example
