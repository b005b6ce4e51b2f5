// SPDX-License-Identifier: Apache-2.0
//
// crumb-calibrate as people run it: the program, its output and its exit status.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <string>

#include "crumb/cuda/fit_profile.h"
#include "crumb/cuda/profile.h"
#include "crumb/cuda/statistics.h"
#include "proto/base/file.h"
#include "tests/cuda/calibrate/synthetic.h"

namespace crumb {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

struct Outcome {
  int status = -1;
  std::string out;
  std::string err;
};

std::string TextOf(const std::filesystem::path& path) {
  const auto bytes = ReadFile(path, size_t{1} << 20);
  EXPECT_TRUE(bytes.ok()) << bytes.status();
  return bytes.ok() ? std::string(reinterpret_cast<const char*>(bytes->data()), bytes->size())
                    : std::string();
}

class CalibrateProgramTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::path(testing::TempDir()) /
              ("calibrate_" + std::to_string(getpid()) + "_" +
               testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::create_directory(folder_);
    const SyntheticModel model{
        .geometry = {.num_layers = 2, .num_kv_heads = 2, .key_dim = 32, .value_dim = 64},
        .num_query_heads = 4};
    auto collector = StatisticsCollector::Create(
        {.model = "synthetic", .geometry = model.geometry, .num_query_heads = 4});
    for (uint32_t layer = 0; layer < 2; ++layer) {
      const SyntheticText text = model.Text(layer, 1200, 1);
      ASSERT_TRUE(collector->AddText(layer, text.queries, text.keys, text.values).ok());
    }
    const auto file = Statistics::Serialize(*collector->Finish());
    ASSERT_TRUE(file.ok()) << file.status();
    ASSERT_TRUE(WriteFileAtomically(folder_ / "stats", *file).ok());
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  // Runs the program in the test's folder, after other commands of the shell.
  Outcome Run(const std::string& arguments, const std::string& before = "") const {
    const std::string command = "cd '" + folder_.string() + "' && " + before +
                                "'" CRUMB_CALIBRATE "' " + arguments + " >.out 2>.err";
    const int result = std::system(command.c_str());  // NOLINT(concurrency-mt-unsafe)
    return {.status = WIFEXITED(result) ? WEXITSTATUS(result) : -1,
            .out = TextOf(folder_ / ".out"),
            .err = TextOf(folder_ / ".err")};
  }

  std::filesystem::path folder_;
};

TEST_F(CalibrateProgramTest, FitsAProfileThatInspectsAndVerifies) {
  const Outcome fit = Run("fit stats --out profile");
  EXPECT_EQ(fit.status, 0) << fit.err;
  EXPECT_THAT(fit.err, IsEmpty());
  const auto profile = Profile::Load(folder_ / "profile");
  ASSERT_TRUE(profile.ok()) << profile.status();
  const std::string id = (*profile)->id().Hex();
  EXPECT_THAT(fit.out, AllOf(HasSubstr("wrote profile"), HasSubstr(id)));

  const Outcome inspect = Run("inspect profile");
  EXPECT_EQ(inspect.status, 0) << inspect.err;
  EXPECT_THAT(inspect.out,
              AllOf(HasSubstr(id), HasSubstr("2 layers, 2 KV heads, key_dim 32, value_dim 64"),
                    HasSubstr("oscar-int2-tilted"), HasSubstr("sink 64, recent 256"),
                    HasSubstr("one a KV head, orthogonal to"), HasSubstr("searched for each row"),
                    HasSubstr("0.92"), HasSubstr("(2.67 bits an element)")));

  const Outcome verify = Run("verify profile --id " + id.substr(0, 8));
  EXPECT_EQ(verify.status, 0) << verify.err;
  EXPECT_THAT(verify.out, AllOf(HasSubstr("OK"), HasSubstr(id), HasSubstr("to what reads them")));
}

TEST_F(CalibrateProgramTest, HeadsGetARecipeByAttentionOnRows) {
  const Outcome fit = Run("fit stats --out profile");
  EXPECT_EQ(fit.status, 0) << fit.err;
  EXPECT_THAT(fit.out, AllOf(HasSubstr("key recipes      "), HasSubstr("value recipes    ")));
  const Outcome plain = Run("fit stats --out plain --no-choose");
  EXPECT_EQ(plain.status, 0) << plain.err;
  EXPECT_THAT(plain.out, Not(HasSubstr("recipes")));
  const Outcome margin = Run("fit stats --out plain --key-margin 1");
  EXPECT_EQ(margin.status, 1);
  EXPECT_THAT(margin.err, HasSubstr("key_choice_margin is 1"));
}

TEST_F(CalibrateProgramTest, FlagsChooseTheRecipe) {
  const Outcome fit =
      Run("fit stats -o profile --codec oscar-int2 --value-rotation hadamard --rotation per-layer "
          "--key-clip 0.9 --value-clip 0 --sink 128 --recent 512");
  EXPECT_EQ(fit.status, 0) << fit.err;
  const auto profile = Profile::Load(folder_ / "profile");
  ASSERT_TRUE(profile.ok()) << profile.status();
  EXPECT_EQ((*profile)->codec(), CodecId::kOscarInt2);
  EXPECT_EQ((*profile)->windows(), (Windows{.sink_tokens = 128, .recent_tokens = 512}));
  const HeadParameters& head = (*profile)->head(0, 0);
  EXPECT_EQ(head.key_clip, 0.9F);
  EXPECT_EQ(head.value_clip, 0.0F);
  EXPECT_EQ(head.value_rotation[0], 0.125F);  // Hadamard, although --rotation came later.
  EXPECT_EQ(head.key_rotation, (*profile)->head(0, 1).key_rotation);
  EXPECT_THAT(fit.out,
              AllOf(HasSubstr("one a layer"), HasSubstr("value levels     range, clip off")));
}

TEST_F(CalibrateProgramTest, LevelsByDeviationAreACodecAndAnOptionOfValues) {
  const Outcome lm = Run("fit stats --out profile --codec oscar-int2-lm");
  EXPECT_EQ(lm.status, 0) << lm.err;
  EXPECT_THAT(lm.out, AllOf(HasSubstr("oscar-int2-lm\n"),
                            HasSubstr("key levels       by each row's mean and deviation\n"),
                            HasSubstr("value levels     by each row's mean and deviation\n")));
  EXPECT_EQ(Run("verify profile").status, 0);
  const Outcome report = Run("report stats profile --out page.html");
  EXPECT_EQ(report.status, 0) << report.err;
  EXPECT_THAT(TextOf(folder_ / "page.html"), HasSubstr("oscar-int2-lm"));
  const Outcome tilted = Run("fit stats --out profile --value-levels deviation --no-choose");
  EXPECT_EQ(tilted.status, 0) << tilted.err;
  EXPECT_THAT(tilted.out,
              AllOf(HasSubstr("oscar-int2-tilted\n"), HasSubstr("range searched for each row"),
                    HasSubstr("value levels     by each row's mean and deviation")));
}

TEST_F(CalibrateProgramTest, KeysMayTryOtherRanges) {
  const Outcome narrow = Run("fit stats --out profile --key-ranges narrow --no-choose");
  EXPECT_EQ(narrow.status, 0) << narrow.err;
  EXPECT_THAT(narrow.out, HasSubstr("other ones than the codec's in 4 of 4 heads"));
  const Outcome chosen = Run("fit stats --out profile --key-ranges chosen --key-margin 0");
  EXPECT_EQ(chosen.status, 0) << chosen.err;
  EXPECT_THAT((*Profile::Load(folder_ / "profile"))->choices(),
              AllOf(HasSubstr("narrow ranges"), HasSubstr("wide ranges")));
  const Outcome no_choice = Run("fit stats --out profile --key-ranges chosen --no-choose");
  EXPECT_EQ(no_choice.status, 1);
  EXPECT_THAT(no_choice.err, HasSubstr("key_ranges are to be chosen"));
}

TEST_F(CalibrateProgramTest, InspectsStatisticsToo) {
  const Outcome inspect = Run("inspect stats");
  EXPECT_EQ(inspect.status, 0) << inspect.err;
  EXPECT_THAT(inspect.out, AllOf(HasSubstr("synthetic"), HasSubstr("1200"), HasSubstr("4"),
                                 HasSubstr("  queries        largest direction ")));
}

TEST_F(CalibrateProgramTest, InspectSaysHowEqualTheChannelsAre) {
  ASSERT_EQ(Run("fit stats --out profile").status, 0);
  const Outcome inspect = Run("inspect profile --stats stats");
  EXPECT_EQ(inspect.status, 0) << inspect.err;
  EXPECT_THAT(inspect.out,
              AllOf(HasSubstr("key channels     equal to"), HasSubstr("e-0"),
                    HasSubstr("value channels"), HasSubstr("  values         largest direction ")));
  ASSERT_EQ(Run("import --k '" CRUMB_TORCH_FIXTURES "/v1_keys.pt' --v '" CRUMB_TORCH_FIXTURES
                "/v1_values.pt' --kv-heads 3 --out other")
                .status,
            0);
  const Outcome other = Run("inspect other --stats stats");
  EXPECT_EQ(other.status, 1);
  EXPECT_THAT(other.err, HasSubstr("Both must be of one model"));
}

TEST_F(CalibrateProgramTest, BadInputIsNamedAndWritesNothing) {
  const Outcome missing = Run("fit nothing --out profile");
  EXPECT_EQ(missing.status, 1);
  EXPECT_THAT(missing.err, AllOf(HasSubstr("crumb-calibrate: "), HasSubstr("nothing")));

  const Outcome window = Run("fit stats --out profile --sink 65");
  EXPECT_EQ(window.status, 1);
  EXPECT_THAT(window.err, AllOf(HasSubstr("'sink_tokens' is 65"), HasSubstr("multiple of 64")));

  const Outcome clip = Run("fit stats --out profile --value-clip 2");
  EXPECT_EQ(clip.status, 1);
  EXPECT_THAT(clip.err, HasSubstr("value_clip is 2"));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "profile"));

  std::filesystem::resize_file(folder_ / "stats", 1000);
  const Outcome truncated = Run("fit stats --out profile");
  EXPECT_EQ(truncated.status, 1);
  EXPECT_THAT(truncated.err, AllOf(HasSubstr("stats"), HasSubstr("truncated")));
  EXPECT_THAT(Run("inspect stats").err, HasSubstr("truncated"));

  const Outcome folder = Run("fit stats --out no/such/profile");
  EXPECT_EQ(folder.status, 1);
}

TEST_F(CalibrateProgramTest, AProfileThatIsNotTheExpectedOneFails) {
  ASSERT_EQ(Run("fit stats --out profile").status, 0);
  const Outcome other = Run("verify profile --id 00000000ffff");
  EXPECT_EQ(other.status, 1);
  EXPECT_THAT(other.err, AllOf(HasSubstr("expected 00000000ffff"), HasSubstr("profile")));
  EXPECT_EQ(Run("verify stats").status, 1);
}

TEST_F(CalibrateProgramTest, RotationsThatReadersAcceptButFloatsWouldHoldBetterAreNotVerified) {
  const auto statistics = Statistics::Load(folder_ / "stats");
  ASSERT_TRUE(statistics.ok()) << statistics.status();
  for (const float stretch : {1.0F, 1.00001F}) {
    auto fitted = FitProfile(*statistics, {.choose = false});
    ASSERT_TRUE(fitted.ok()) << fitted.status();
    for (float& x : fitted->parts.value_rotation) {
      x *= stretch;
    }
    const auto file = Profile::Serialize(fitted->parts);
    ASSERT_TRUE(file.ok()) << file.status();
    ASSERT_TRUE(WriteFileAtomically(folder_ / "profile", *file).ok());
    const Outcome verify = Run("verify profile");
    EXPECT_EQ(verify.status, stretch == 1 ? 0 : 1) << verify.err;
    EXPECT_THAT(verify.err, HasSubstr(stretch == 1 ? "" : "to 2.0e-05 alone"));
  }
}

TEST_F(CalibrateProgramTest, AFailedFitLeavesTheOldProfile) {
  ASSERT_EQ(Run("fit stats --out profile").status, 0);
  const std::string before = TextOf(folder_ / "profile");
  ASSERT_EQ(Run("fit stats --out profile --damping 7").status, 1);
  EXPECT_EQ(TextOf(folder_ / "profile"), before);
}

// A limit on file sizes stands for a disk that is full: both end in a failed write.
TEST_F(CalibrateProgramTest, AFullDiskLeavesNoHalfFile) {
  ASSERT_EQ(Run("fit stats --out profile").status, 0);
  const std::string before = TextOf(folder_ / "profile");
  const auto files = [&] {
    size_t count = 0;
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
      count += entry.path().filename().string().starts_with(".") ? size_t{0} : size_t{1};
    }
    return count;
  };
  const size_t num_files = files();
  for (const char* arguments :
       {"fit stats --out profile", "fit stats --out other", "report stats profile --out page.html",
        "import --k '" CRUMB_TORCH_FIXTURES "/v2_keys.pt' --v '" CRUMB_TORCH_FIXTURES
        "/v1_values.pt' --out other"}) {
    const Outcome outcome = Run(arguments, "trap '' XFSZ; ulimit -f 8; ");
    EXPECT_EQ(outcome.status, 1) << arguments;
    EXPECT_THAT(outcome.err, HasSubstr("cannot write")) << arguments;
    EXPECT_EQ(files(), num_files) << arguments;
  }
  EXPECT_EQ(TextOf(folder_ / "profile"), before);
}

TEST_F(CalibrateProgramTest, ImportsPublishedRotations) {
  const std::string files =
      "import --k '" CRUMB_TORCH_FIXTURES "/v2_keys.pt' --v '" CRUMB_TORCH_FIXTURES
      "/v1_values.pt' --out profile";
  const Outcome published = Run(files);
  EXPECT_EQ(published.status, 0) << published.err;
  EXPECT_THAT(published.out, AllOf(HasSubstr("oscar-int2\n"), HasSubstr("key_dim 32")));
  EXPECT_THAT(published.err, HasSubstr("the model's layers 2 (3, 7)"));

  const Outcome aware = Run(files + " --stats stats");
  EXPECT_EQ(aware.status, 0) << aware.err;
  EXPECT_THAT(aware.out, AllOf(HasSubstr("oscar-int2-aware"), HasSubstr("synthetic")));
  EXPECT_EQ(Run("verify profile").status, 0);

  const Outcome lm = Run(files + " --codec oscar-int2-lm");
  EXPECT_EQ(lm.status, 0) << lm.err;
  EXPECT_THAT(lm.out, HasSubstr("oscar-int2-lm\n"));
}

TEST_F(CalibrateProgramTest, RotationsThatWouldRunCodeAreNotImported) {
  const Outcome outcome =
      Run("import --k '" CRUMB_TORCH_FIXTURES "/runs_code.pt' --v '" CRUMB_TORCH_FIXTURES
          "/v1_values.pt' --kv-heads 2 --out profile");
  EXPECT_EQ(outcome.status, 1);
  EXPECT_THAT(outcome.err, AllOf(HasSubstr("runs_code.pt"), HasSubstr("is refused")));
  EXPECT_THAT(outcome.out, Not(HasSubstr("executed")));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "profile"));
}

TEST_F(CalibrateProgramTest, ReportsWhatAProfileCosts) {
  ASSERT_EQ(Run("fit stats --out profile").status, 0);
  const Outcome report = Run("report stats profile --out page.html --json numbers.json");
  EXPECT_EQ(report.status, 0) << report.err;
  EXPECT_THAT(report.out, AllOf(HasSubstr("Half of the loss sits in"), HasSubstr("wrote page")));
  EXPECT_THAT(TextOf(folder_ / "page.html"), HasSubstr("</html>"));
  EXPECT_THAT(TextOf(folder_ / "numbers.json"),
              AllOf(HasSubstr("\"crumb.report.v1\""), HasSubstr("\"this profile\"")));
}

TEST_F(CalibrateProgramTest, AReportOfNothingWritesNothing) {
  const Outcome report = Run("report stats stats --out page.html");
  EXPECT_EQ(report.status, 1);
  EXPECT_FALSE(std::filesystem::exists(folder_ / "page.html"));
}

TEST_F(CalibrateProgramTest, HelpTeachesByExample) {
  const Outcome help = Run("fit --help");
  EXPECT_EQ(help.status, 0);
  EXPECT_THAT(help.out, AllOf(HasSubstr("Examples:"), HasSubstr("--key-rotation hadamard")));
  const Outcome usage = Run("fit stats --codec int3 --out x");
  EXPECT_EQ(usage.status, 2);
  EXPECT_THAT(usage.err, AllOf(HasSubstr("int3"), HasSubstr("oscar-int2-aware")));
  const Outcome nothing = Run("");
  EXPECT_EQ(nothing.status, 2);
  EXPECT_THAT(nothing.err, HasSubstr("inspect"));
}

TEST_F(CalibrateProgramTest, WrongArgumentsAreNamed) {
  for (const auto& [arguments, name] :
       {std::pair{"frob", "frob"}, std::pair{"inspect stats --all", "--all"},
        std::pair{"fit stats", "--out"}, std::pair{"fit --out= stats", "--out= has an empty value"},
        std::pair{"fit stats --out p --sink many", "many"}}) {
    const Outcome outcome = Run(arguments);
    EXPECT_EQ(outcome.status, 2) << arguments;
    EXPECT_THAT(outcome.err, HasSubstr(name)) << arguments;
  }
  EXPECT_FALSE(std::filesystem::exists(folder_ / "p"));
}

}  // namespace
}  // namespace crumb
