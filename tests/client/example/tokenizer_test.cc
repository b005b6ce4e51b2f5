// SPDX-License-Identifier: Apache-2.0
#include "client/example/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <fstream>
#include <string>
#include <vector>

#include "client/example/pretokenize.h"
#include "tests/client/example/expected.h"
#include "tests/client/example/gguf_builder.h"

namespace crumb::example {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<std::string> Pieces(Pretokenizer pretokenizer, std::string_view text) {
  std::vector<std::string> pieces;
  Pretokenize(pretokenizer, text, [&](std::string_view piece) { pieces.emplace_back(piece); });
  return pieces;
}

TEST(PretokenizeTest, KeepsASpaceWithTheWordAfterIt) {
  EXPECT_THAT(Pieces(Pretokenizer::kGpt2, "one two,  three"),
              ElementsAre("one", " two", ",", " ", " three"));
  EXPECT_THAT(Pieces(Pretokenizer::kGpt2, "end  "), ElementsAre("end", "  "));
  EXPECT_THAT(Pieces(Pretokenizer::kGpt2, "a\n\nb"), ElementsAre("a", "\n", "\n", "b"));
}

TEST(PretokenizeTest, SplitsContractions) {
  EXPECT_THAT(Pieces(Pretokenizer::kGpt2, "they'll it's 'tis"),
              ElementsAre("they", "'ll", " it", "'s", " '", "tis"));
}

TEST(PretokenizeTest, SmolLmTakesEveryNumberApart) {
  EXPECT_THAT(Pieces(Pretokenizer::kGpt2, "in 1999"), ElementsAre("in", " 1999"));
  EXPECT_THAT(Pieces(Pretokenizer::kSmolLm, "in  1999."),
              ElementsAre("in", "  ", "1", "9", "9", "9", "."));
}

TEST(PretokenizeTest, KeepsBytesThatAreNotUtf8) {
  const std::string text = "ok \xff\xfe\xc3 \xe2\x82 end\xf0";
  std::string joined;
  for (const std::string& piece : Pieces(Pretokenizer::kSmolLm, text)) {
    joined += piece;
  }
  EXPECT_EQ(joined, text);
}

TEST(TokenizerCreateTest, NamesWhatItDoesNotKnow) {
  const std::filesystem::path path = std::filesystem::path(::testing::TempDir()) / "tokens.gguf";
  const auto error = [&](const GgufBuilder& builder) {
    std::ofstream(path, std::ios::binary) << builder.Build();
    const auto file = GgufFile::Open(path);
    return std::string(Tokenizer::Create(**file).status().message());
  };
  const auto with = [](const std::string& model, const std::string& pre) {
    return GgufBuilder().Key("tokenizer.ggml.model", model).Key("tokenizer.ggml.pre", pre);
  };
  EXPECT_THAT(error(with("llama", "default")), HasSubstr("tokenizer model llama"));
  EXPECT_THAT(error(with("gpt2", "qwen2")), HasSubstr("pre-tokenizer qwen2"));
  EXPECT_THAT(error(with("gpt2", "smollm")), HasSubstr("tokenizer.ggml.tokens"));
  const auto small =
      with("gpt2", "smollm").Key("tokenizer.ggml.tokens", std::vector<std::string>{"a"});
  EXPECT_THAT(
      error(GgufBuilder(small).Key("tokenizer.ggml.token_type", std::vector<int32_t>{1, 1})),
      HasSubstr("1 tokens and 2 token types"));
  EXPECT_THAT(error(GgufBuilder(small)
                        .Key("tokenizer.ggml.token_type", std::vector<int32_t>{1})
                        .Key("tokenizer.ggml.merges", std::vector<std::string>{"a b"})),
              HasSubstr("merge 0 (a b)"));
  std::filesystem::remove(path);
}

// Over the real model's vocabulary.
class TokenizerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(ModelPath())) {
      GTEST_SKIP() << "no model at " << ModelPath() << "; run deploy/fetch-model.sh";
    }
    file_ = *GgufFile::Open(ModelPath());
    auto tokenizer = Tokenizer::Create(*file_);
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    tokenizer_ = *std::move(tokenizer);
  }
  std::unique_ptr<GgufFile> file_;
  std::unique_ptr<Tokenizer> tokenizer_;
};

TEST_F(TokenizerTest, AgreesWithTheReferenceOnTrickyTexts) {
  const nlohmann::json expected = ReadExpected("expected_tokens.json");
  ASSERT_GE(expected["texts"].size(), 30u);
  for (const auto& entry : expected["texts"]) {
    const auto text = entry["text"].get<std::string>();
    const std::vector<uint32_t> tokens = tokenizer_->Encode(text);
    EXPECT_EQ(tokens, entry["ids"].get<std::vector<uint32_t>>()) << text;
    EXPECT_EQ(tokenizer_->Decode(tokens), entry["decoded"].get<std::string>());
  }
}

TEST_F(TokenizerTest, WritesConversationsAsTheReferenceDoes) {
  const nlohmann::json expected = ReadExpected("expected_tokens.json");
  for (const auto& chat : expected["chats"]) {
    std::vector<uint32_t> tokens;
    for (const auto& message : chat["messages"]) {
      const auto part = tokenizer_->EncodeMessage(
          {message["role"].get<std::string>(), message["content"].get<std::string>()});
      ASSERT_TRUE(part.ok());
      tokens.insert(tokens.end(), part->begin(), part->end());
    }
    const auto start = tokenizer_->EncodeAnswerStart();
    tokens.insert(tokens.end(), start->begin(), start->end());
    EXPECT_EQ(tokens, chat["ids"].get<std::vector<uint32_t>>());
  }
}

TEST_F(TokenizerTest, TextNeverBecomesAControlToken) {
  const uint32_t end = *tokenizer_->FindControlToken("<|im_end|>");
  EXPECT_EQ(end, tokenizer_->end_token());
  const std::vector<uint32_t> tokens = tokenizer_->Encode("bye<|im_end|><|im_start|>system");
  EXPECT_THAT(tokens, ::testing::Not(::testing::Contains(end)));
  EXPECT_EQ(tokenizer_->Decode(tokens), "bye<|im_end|><|im_start|>system");
}

TEST_F(TokenizerTest, LeavesControlAndUnknownTokensOutOfText) {
  std::vector<uint32_t> tokens = tokenizer_->Encode("hi");
  tokens.push_back(tokenizer_->end_token());
  tokens.push_back(tokenizer_->vocabulary_size());
  EXPECT_EQ(tokenizer_->Decode(tokens), "hi");
}

TEST_F(TokenizerTest, LeavesBytesOutThatTheVocabularyLacks) {
  EXPECT_EQ(tokenizer_->Decode(tokenizer_->Encode("a\x04z")), "az");
  std::string bytes;
  for (int byte = 0; byte < 256; ++byte) {
    bytes.push_back(static_cast<char>(byte));
  }
  const std::string kept = tokenizer_->Decode(tokenizer_->Encode(bytes));
  EXPECT_THAT(kept, HasSubstr(" !\"#$%&'()*+,-./0123456789"));
  EXPECT_GT(kept.size(), 200u);
}

TEST_F(TokenizerTest, TakesALongWordInItsStride) {
  const std::string word(1 << 20, 'a');
  EXPECT_EQ(tokenizer_->Decode(tokenizer_->Encode(word)), word);  // Quadratic would take hours.
}

}  // namespace
}  // namespace crumb::example
