// SPDX-License-Identifier: Apache-2.0
#include "client/example/perplexity.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <vector>

#include "client/example/model_profile.h"
#include "client/example/progress.h"
#include "client/example/token_file.h"
#include "tests/client/example/tiny_llama.h"

namespace crumb::example {
namespace {

TEST(PerplexityTest, AModelThatKnowsNothingIsAsPerplexedAsItsVocabularyIsLarge) {
  TinyLlama tiny;  // All rows of the output alike: equal logits.
  tiny.vocabulary_size = 50;
  const auto path = std::filesystem::path(::testing::TempDir()) / "perplexity_test.gguf";
  std::ofstream(path, std::ios::binary) << tiny.Build();
  const auto file = *GgufFile::Open(path);
  std::filesystem::remove(path);
  const auto model = *LlamaModel::Load(*file, 1);
  PerplexityOptions options;
  options.profile = *IdentityProfile(model->config().geometry());
  options.keep_all_bf16 = true;
  options.scored_from = 70;
  const std::vector<uint32_t> text(200, 7);
  uint32_t seen = 0;
  const auto likelihood = ScoreText(*model, text, options, [&](uint32_t count) { seen += count; });
  ASSERT_TRUE(likelihood.ok()) << likelihood.status();
  EXPECT_NEAR(likelihood->Perplexity(), 50, 1e-3);
  EXPECT_EQ(likelihood->num_predictions, 129u);  // Of the tokens at 71 to 199.
  EXPECT_EQ(seen, 200u);
}

TEST(TokenFileTest, ReadsTextsAndNamesWhatIsWrong) {
  const auto path = std::filesystem::path(::testing::TempDir()) / "token_file_test.u32";
  const std::vector<uint32_t> ids = {1, 2, 3, 4, 5, 6};
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(ids.data()),
             static_cast<std::streamsize>(ids.size() * 4));
  const auto file = TokenFile::Read(path, 3, 7);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(file->num_texts(), 2u);
  EXPECT_THAT(file->text(1), ::testing::ElementsAre(4, 5, 6));
  EXPECT_THAT(TokenFile::Read(path, 4, 7).status().message(), ::testing::HasSubstr("24 bytes"));
  EXPECT_THAT(TokenFile::Read(path, 3, 6).status().message(),
              ::testing::HasSubstr("id 6 at index 5"));
  std::filesystem::remove(path);
  EXPECT_EQ(TokenFile::Read(path, 3, 7).status().code(), absl::StatusCode::kNotFound);
}

TEST(ProgressTest, SaysHowFarHowFastAndHowLong) {
  Progress progress("collect", 400, "tokens");
  progress.Add(100);
  const std::string line = progress.Line(absl::Seconds(10));
  EXPECT_THAT(line, ::testing::HasSubstr("100/400 tokens  10/s  30 s left"));
}

}  // namespace
}  // namespace crumb::example
