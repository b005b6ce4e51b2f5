// SPDX-License-Identifier: Apache-2.0
//
// crumb-example as people run it, with files that it cannot use: it names them, and ends.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <vector>

#include "tests/client/example/tiny_llama.h"
#include "tests/support/daemon_process.h"
#include "tests/support/test_profile.h"

namespace crumb::example {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class ExampleProgramTest : public ::testing::Test {
 protected:
  void SetUp() override { std::filesystem::create_directory(folder_); }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string Write(const std::string& name, const std::string& bytes) const {
    std::ofstream(folder_ / name, std::ios::binary) << bytes;
    return (folder_ / name).string();
  }
  // Of these ids, a text of 4.
  std::string WriteTokens(const std::vector<uint32_t>& ids) const {
    return Write("tokens", {reinterpret_cast<const char*>(ids.data()), ids.size() * 4});
  }
  static std::string FileOf(const Profile& profile) {
    return {reinterpret_cast<const char*>(profile.file().data()), profile.file().size()};
  }
  // What it says of files that it cannot use.
  static std::string Refusal(const std::vector<std::string>& arguments, int exit_status = 1) {
    const ProgramResult result = RunProgram("crumb-example", arguments);
    EXPECT_EQ(result.exit_status, exit_status) << result.err;
    EXPECT_EQ(result.out, "");
    return result.err;
  }
  static std::vector<std::string> Perplexity(const std::string& model, const std::string& tokens) {
    return {"perplexity",      "--model",        model, "--tokens", tokens,
            "--text-tokens=4", "--scored-from=1"};
  }
  static std::vector<std::string> With(std::vector<std::string> arguments,
                                       const std::string& flag,
                                       const std::string& value) {
    arguments.push_back(flag);
    arguments.push_back(value);
    return arguments;
  }

  const std::filesystem::path folder_ =
      std::filesystem::path(::testing::TempDir()) /
      ("program_test_" + std::to_string(getpid()) + "_" +
       ::testing::UnitTest::GetInstance()->current_test_info()->name());
};

TEST_F(ExampleProgramTest, TruncatedModelsAreRefusedByName) {
  const std::string whole = TinyLlama().Build();
  const std::string tokens = WriteTokens({0, 1, 2, 0});
  ASSERT_EQ(RunProgram("crumb-example", Perplexity(Write("whole.gguf", whole), tokens)).exit_status,
            0);
  for (const size_t length :
       {size_t{0}, size_t{3}, size_t{20}, whole.size() / 3, whole.size() / 2, whole.size() - 64}) {
    const std::string model = Write("cut.gguf", whole.substr(0, length));
    EXPECT_THAT(Refusal(Perplexity(model, tokens)), HasSubstr(model)) << length << " bytes";
  }
}

TEST_F(ExampleProgramTest, ModelsThatAreNoneAreRefusedByName) {
  TinyLlama mamba;
  mamba.architecture = "mamba";
  const std::string model = Write("mamba.gguf", mamba.Build());
  EXPECT_THAT(Refusal(Perplexity(model, WriteTokens({0, 1, 2, 0}))),
              HasSubstr("architecture mamba"));
  const auto generate = [&](const std::string& path) {
    return std::vector<std::string>{"generate", "--model", path, "--profile=x", "--prompt=Hello"};
  };
  EXPECT_THAT(Refusal(generate(model)), HasSubstr("architecture mamba"));
  EXPECT_THAT(Refusal(generate((folder_ / "none.gguf").string())), HasSubstr("none.gguf"));
  EXPECT_THAT(Refusal(generate(folder_.string())),
              AllOf(HasSubstr(folder_.string()), HasSubstr("not a file")));
  EXPECT_THAT(Refusal(generate(Write("notes.txt", "Dear diary"))), HasSubstr("GGUF"));
}

TEST_F(ExampleProgramTest, AProfileOfAnotherGeometryIsRefusedWithBoth) {
  const auto other = MakeTestProfile(
      {.geometry = {.num_layers = 2, .num_kv_heads = 2, .key_dim = 64, .value_dim = 64}});
  const auto run = Perplexity(Write("model.gguf", TinyLlama().Build()), WriteTokens({0, 1, 2, 0}));
  EXPECT_THAT(Refusal(With(run, "--profile", Write("profile", FileOf(*other)))),
              AllOf(HasSubstr("2 layers, 2 KV heads, head_dim 64"),
                    HasSubstr("1 layers, 1 KV heads, head_dim 32"), HasSubstr("fit a profile")));
}

TEST_F(ExampleProgramTest, SpoiltProfilesAreRefusedByName) {
  const auto profile = MakeTestProfile(
      {.geometry = {.num_layers = 1, .num_kv_heads = 1, .key_dim = 32, .value_dim = 32}});
  const auto run = Perplexity(Write("model.gguf", TinyLlama().Build()), WriteTokens({0, 1, 2, 0}));
  const std::string good = FileOf(*profile);
  ASSERT_EQ(RunProgram("crumb-example", With(run, "--profile", Write("good", good))).exit_status,
            0);

  const std::string cut = Write("cut", good.substr(0, good.size() - 1));
  EXPECT_THAT(Refusal(With(run, "--profile", cut)), HasSubstr(cut));
  std::string lying = good;
  lying[6] = 1;  // Of the header's length, the first 8 bytes.
  EXPECT_THAT(Refusal(With(run, "--profile", Write("lying", lying))),
              AllOf(HasSubstr("lying"), HasSubstr("the header says it has")));
  std::string poisoned = good;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::memcpy(poisoned.data() + poisoned.size() - sizeof(nan), &nan, sizeof(nan));
  EXPECT_THAT(Refusal(With(run, "--profile", Write("poisoned", poisoned))),
              AllOf(HasSubstr("poisoned"), HasSubstr("value_rotation.0"), HasSubstr("is NaN")));
  EXPECT_THAT(Refusal(With(run, "--profile", (folder_ / "none").string())), HasSubstr("none"));
}

TEST_F(ExampleProgramTest, TokensBeyondTheVocabularyAndBrokenTextsAreNamed) {
  const std::string model = Write("model.gguf", TinyLlama().Build());
  EXPECT_THAT(Refusal(Perplexity(model, WriteTokens({0, 1, 3, 0}))),
              AllOf(HasSubstr("id 3 at index 2"), HasSubstr("vocabulary of 3 tokens")));
  EXPECT_THAT(Refusal(Perplexity(model, WriteTokens({0, 1, 2}))),
              AllOf(HasSubstr("12 bytes"), HasSubstr("texts of 4 token ids")));
  EXPECT_THAT(Refusal(Perplexity(model, WriteTokens({}))), HasSubstr("0 bytes"));
}

TEST_F(ExampleProgramTest, WrongArgumentsAreStatusTwoAndNamed) {
  EXPECT_THAT(Refusal({}, 2), HasSubstr("perplexity"));
  EXPECT_THAT(Refusal({"frob"}, 2), HasSubstr("frob"));
  EXPECT_THAT(Refusal({"generate", "--model", "m"}, 2), HasSubstr("--profile"));
  EXPECT_THAT(Refusal({"generate", "--model=", "--prompt=x", "--profile=y"}, 2),
              HasSubstr("--model= has an empty value"));
  EXPECT_THAT(Refusal({"generate", "--model=m", "--prompt=x", "--profile=y", "--threads=0"}, 2),
              HasSubstr("--threads"));
  EXPECT_THAT(
      Refusal({"generate", "--model=m", "--prompt=x", "--profile=y", "--data-plane=carrier"}, 2),
      HasSubstr("carrier"));
}

}  // namespace
}  // namespace crumb::example
