// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <memory>
#include <numeric>
#include <regex>
#include <set>
#include <string>

#include "crumb/cuda/fit_profile.h"
#include "cuda/calibrate/report/figures.h"
#include "cuda/calibrate/report/gaussian.h"
#include "cuda/calibrate/report/page.h"
#include "cuda/calibrate/report/svg.h"
#include "cuda/calibrate/report/verdict.h"
#include "cuda/calibrate/rotation.h"
#include "proto/base/file.h"
#include "tests/cuda/calibrate/synthetic.h"

namespace crumb::calibrate {
namespace {

using testing::AllOf;
using testing::Contains;
using testing::Each;
using testing::HasSubstr;
using testing::Not;
using testing::SizeIs;

constexpr Geometry kGeometry = {.num_layers = 3, .num_kv_heads = 2, .key_dim = 64, .value_dim = 32};

const Statistics& TheStatistics() {
  static const Statistics* const kStatistics = [] {
    const SyntheticModel model{.geometry = kGeometry, .num_query_heads = 4};
    auto collector = StatisticsCollector::Create(
        {.model = "synthetic <b>", .geometry = kGeometry, .num_query_heads = 4});
    for (uint32_t layer = 0; layer < kGeometry.num_layers; ++layer) {
      const SyntheticText text = model.Text(layer, 2000, 1);
      EXPECT_TRUE(collector->AddText(layer, text.queries, text.keys, text.values).ok());
    }
    return new Statistics(*collector->Finish());
  }();
  return *kStatistics;
}

std::shared_ptr<const Profile> Fit(const FitOptions& options) {
  const auto fitted = FitProfile(TheStatistics(), options);
  EXPECT_TRUE(fitted.ok()) << fitted.status();
  auto file = Profile::Serialize(fitted->parts);
  EXPECT_TRUE(file.ok()) << file.status();
  return *Profile::Parse(*std::move(file));
}

const ReportFigures& TheFigures() {
  static const ReportFigures* const kFigures = [] {
    auto figures = ComputeFigures(TheStatistics(), *Fit({.choose = false}), {.num_pages = 4});
    EXPECT_TRUE(figures.ok()) << figures.status();
    return new ReportFigures(*std::move(figures));
  }();
  return *kFigures;
}

const RecipeFigures& Recipe(const std::string& name) {
  for (const RecipeFigures& recipe : TheFigures().recipes) {
    if (recipe.name == name) {
      return recipe;
    }
  }
  ADD_FAILURE() << name;
  return TheFigures().recipes.front();
}

TEST(GaussianTest, DrawsRowsOfTheGivenMoments) {
  constexpr size_t kDim = 32;
  constexpr size_t kRows = 40'000;
  std::vector<double> moment(kDim * kDim);
  std::vector<double> mean(kDim, 0.5);
  for (size_t i = 0; i < kDim; ++i) {
    for (size_t j = 0; j < kDim; ++j) {  // Variance i + 1, neighbours correlated; plus the mean's.
      moment[i * kDim + j] = (i == j                     ? static_cast<double>(i + 1)
                              : i + 1 == j || j + 1 == i ? 0.4
                                                         : 0) +
                             0.25;
    }
  }
  const Gaussian gaussian(moment, mean, kDim);
  EXPECT_NEAR(std::accumulate(gaussian.eigenvalues().begin(), gaussian.eigenvalues().end(), 0.0),
              kDim * (kDim + 1) / 2.0, 1e-9);  // The trace.
  EXPECT_TRUE(std::ranges::is_sorted(gaussian.eigenvalues(), std::ranges::greater()));
  const std::vector<float> rows = gaussian.Draw(kRows, 7);
  EXPECT_EQ(rows, gaussian.Draw(kRows, 7));
  EXPECT_NE(rows, gaussian.Draw(kRows, 8));
  for (const auto& [i, j] : {std::pair<size_t, size_t>(0, 0), {3, 4}, {31, 31}, {2, 20}}) {
    double sum = 0;
    for (size_t row = 0; row < kRows; ++row) {
      sum += double{rows[row * kDim + i]} * double{rows[row * kDim + j]};
    }
    // Six standard errors of a product of two such variables.
    const double spread = std::sqrt(static_cast<double>((i + 2) * (j + 2)) * 2 / kRows);
    EXPECT_NEAR(sum / kRows, moment[i * kDim + j], 6 * spread) << i << " " << j;
  }
}

TEST(AttentionProbeTest, MoreExactRowsLoseLess) {
  constexpr size_t kDim = 32;
  AttentionSample sample{
      .key_dim = kDim, .value_dim = kDim, .queries = {}, .keys = {}, .values = {}};
  // Rows of four levels, 0 to 3, are what two bits hold exactly.
  for (size_t i = 0; i < kPageTokens * kDim; ++i) {
    sample.keys.push_back(static_cast<float>((i * 7 + i / kDim) % 4));
    sample.values.push_back(static_cast<float>((i * 5 + i / kDim) % 4));
  }
  for (size_t i = 0; i < 8 * kDim; ++i) {
    sample.queries.push_back(static_cast<float>(i % 5) - 2);
  }
  FloatMatrix identity(kDim * kDim);
  for (size_t i = 0; i < kDim; ++i) {
    identity[i * kDim + i] = 1;
  }
  const std::vector<float> mean(kDim);
  HeadParameters head{.key_dim = kDim, .value_dim = kDim, .codec = CodecId::kOscarInt2};
  head.key_rotation = head.value_rotation = identity.data();
  head.key_mean = mean.data();
  const auto exact = AttentionProbe(sample).Measure(head);
  ASSERT_TRUE(exact.ok()) << exact.status();
  EXPECT_NEAR(exact->output, 0, 1e-6);
  EXPECT_NEAR(exact->scores, 0, 1e-6);

  for (size_t i = 0; i < sample.values.size(); ++i) {
    sample.values[i] += 0.4F * static_cast<float>(std::sin(static_cast<double>(i)));
  }
  const auto values = AttentionProbe(sample).Measure(head);
  ASSERT_TRUE(values.ok());
  EXPECT_NEAR(values->keys, 0, 1e-6);
  EXPECT_GT(values->values, 1e-5);
  EXPECT_EQ(values->values, values->output);

  sample.keys[5] = std::nanf("");
  EXPECT_FALSE(AttentionProbe(sample).Measure(head).ok());
}

TEST(ReportFiguresTest, EveryRecipeHasEveryHeadAndThisProfileIsOneOfThem) {
  const ReportFigures& figures = TheFigures();
  EXPECT_THAT(figures.recipes, SizeIs(8));
  for (const RecipeFigures& recipe : figures.recipes) {
    EXPECT_THAT(recipe.heads, SizeIs(kGeometry.NumHeadBlocks())) << recipe.name;
    double sum = 0;
    for (const AttentionError& error : recipe.heads) {
      EXPECT_GT(error.output, 0) << recipe.name;
      EXPECT_GT(error.keys, 0) << recipe.name;
      sum += error.output;
    }
    EXPECT_NEAR(recipe.mean.output, sum / kGeometry.NumHeadBlocks(), 1e-12);
  }
  // The same recipe, the same rows, the same bytes: the profile under test is a plain fit.
  EXPECT_EQ(ThisProfile(figures).mean.output, Recipe("oscar-int2-tilted").mean.output);
  EXPECT_EQ(ThisProfile(figures).name, "this profile");
}

TEST(ReportFiguresTest, BetterRecipesLoseLess) {
  EXPECT_LT(Recipe("clip").mean.scores, Recipe("naive").mean.scores);
  EXPECT_LT(Recipe("oscar-int2").mean.scores, Recipe("naive").mean.scores);
  EXPECT_LT(Recipe("oscar-int2-lm").mean.scores, Recipe("oscar-int2").mean.scores);
  EXPECT_LT(Recipe("oscar-int2-aware").mean.scores, Recipe("oscar-int2").mean.scores / 2);
  EXPECT_LT(Recipe("oscar-int2-aware").mean.output, Recipe("naive").mean.output);
}

TEST(ReportFiguresTest, RowsAreDrawnWhereStatisticsHaveNone) {
  EXPECT_TRUE(TheFigures().is_from_rows);
  EXPECT_EQ(TheFigures().num_keys, 512U);
  Statistics rowless = TheStatistics();
  rowless.reservoir = {};
  const auto figures = ComputeFigures(rowless, *Fit({.choose = false}), {.num_pages = 2});
  ASSERT_TRUE(figures.ok()) << figures.status();
  EXPECT_FALSE(figures->is_from_rows);
  EXPECT_EQ(figures->num_keys, 128U);
  EXPECT_TRUE(figures->window_ablation.empty());
  EXPECT_THAT(ReportPage(*figures),
              AllOf(HasSubstr("drawn from a Gaussian"), Not(HasSubstr("<h2>Windows</h2>"))));
}

TEST(ReportFiguresTest, WiderWindowsLoseLessAndTakeMore) {
  const std::vector<WindowFigures>& windows = TheFigures().window_ablation;
  ASSERT_THAT(windows, SizeIs(15));
  for (size_t i = 1; i < windows.size(); ++i) {
    if (windows[i].windows.sink_tokens == windows[i - 1].windows.sink_tokens) {
      EXPECT_LE(windows[i].error, windows[i - 1].error);
      EXPECT_GT(windows[i].crumb_bytes, windows[i - 1].crumb_bytes);
    }
  }
  EXPECT_THAT(ReportPage(TheFigures()),
              AllOf(HasSubstr("<h2>Windows</h2>"), HasSubstr("last 1024:")));
}

TEST(ReportFiguresTest, ShowsTheRecipesOfTheHeads) {
  const auto figures = ComputeFigures(TheStatistics(), *Fit({}), {});
  ASSERT_TRUE(figures.ok()) << figures.status();
  EXPECT_THAT(figures->choices.heads, SizeIs(kGeometry.NumHeadBlocks()));
  EXPECT_THAT(ReportPage(*figures), AllOf(HasSubstr("<h2>Recipes by head</h2>"),
                                          HasSubstr("Hadamard alone"), Not(HasSubstr("nan"))));
  EXPECT_THAT(ReportJson(*figures), HasSubstr("\"key_recipes\""));
  EXPECT_THAT(ReportPage(TheFigures()), Not(HasSubstr("Recipes by head")));
}

TEST(ReportFiguresTest, MemoryCountsTheWindowsInBf16) {
  const ReportFigures& figures = TheFigures();
  for (const MemoryFigures& memory : figures.memory) {
    const double token = 2.0 * (64 + 32) * 3 * 2;  // BF16: K and V, layers, heads.
    EXPECT_EQ(memory.bf16_bytes, token * static_cast<double>(memory.num_tokens));
    const double history = static_cast<double>(memory.num_tokens) - 320;
    const double two_bits =
        static_cast<double>(kGeometry.PageBytes(PageEncoding::kInt2)) / kPageTokens;
    EXPECT_NEAR(memory.crumb_bytes, 320 * token + history * two_bits, 1e-6);
  }
}

TEST(ReportFiguresTest, SpectraAreOfEveryLayerAndDescend) {
  const ReportFigures& figures = TheFigures();
  EXPECT_THAT(figures.query_spectra, AllOf(SizeIs(3), Each(SizeIs(64))));
  EXPECT_THAT(figures.key_spectra, AllOf(SizeIs(3), Each(SizeIs(64))));
  EXPECT_THAT(figures.value_spectra, AllOf(SizeIs(3), Each(SizeIs(32))));
  for (const auto& spectrum : figures.query_spectra) {
    EXPECT_TRUE(std::ranges::is_sorted(spectrum, std::ranges::greater()));
  }
}

TEST(ReportFiguresTest, AProfileOfAnotherModelIsRefused) {
  Statistics other = TheStatistics();
  other.geometry.num_layers = 2;
  const auto figures = ComputeFigures(other, *Fit({}), {});
  EXPECT_EQ(figures.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(figures.status().message()),
              AllOf(HasSubstr("of 2 layers"), HasSubstr("of 3 layers")));
  EXPECT_THAT(
      std::string(ComputeFigures(TheStatistics(), *Fit({}), {.num_pages = 0}).status().message()),
      HasSubstr("0 pages"));
}

TEST(ReportFiguresTest, ARecipeThatCannotBeFittedIsLeftOutWithAWarning) {
  const auto profile = Fit({});
  Statistics odd = TheStatistics();
  // Symmetric, and the moment of nothing: two channels that agree beyond their size.
  odd.key_moment[1] = odd.key_moment[kGeometry.key_dim] = 1e6;
  const auto figures = ComputeFigures(odd, *profile, {.num_pages = 1});
  ASSERT_TRUE(figures.ok()) << figures.status();
  EXPECT_THAT(figures->warnings, Contains(HasSubstr("oscar-int2-tilted is left out: fit: ")));
  EXPECT_THAT(figures->recipes, SizeIs(7));
  EXPECT_THAT(ReportPage(*figures), AllOf(HasSubstr("is left out"), Not(HasSubstr("nan"))));
}

TEST(VerdictTest, SaysWhereTheOrderOfRecipesFails) {
  ReportFigures figures = TheFigures();
  for (size_t i = 0; i < figures.recipes.size(); ++i) {
    figures.recipes[i].mean.output = 1.0 / static_cast<double>(i + 1);
  }
  EXPECT_THAT(Verdict(figures),
              Contains(HasSubstr("in the expected order of error: naive > clip")));
  figures.recipes[2].mean.output = 0.9;
  EXPECT_THAT(Verdict(figures),
              Contains(AllOf(HasSubstr("does not hold"),
                             HasSubstr("Hadamard (90.0 %) is no better than clip (50.0 %)"))));
}

TEST(VerdictTest, NamesTheHeadThatMakesARecipeWorse) {
  ReportFigures figures = TheFigures();
  for (size_t i = 0; i < figures.recipes.size(); ++i) {
    figures.recipes[i].mean.output = 1.0 / static_cast<double>(i + 1);
    for (AttentionError& head : figures.recipes[i].heads) {
      head = {.output = 1e-5, .scores = 0.5};
    }
  }
  figures.recipes[3].mean.output = 0.4;  // oscar-int2, after Hadamard's third.
  const uint32_t num_heads = figures.geometry.num_kv_heads;
  figures.recipes[3].heads[num_heads + 1] = {.output = 0.5, .scores = 4};
  EXPECT_THAT(Verdict(figures),
              Contains(AllOf(HasSubstr("most of it in layer 1 head 1 (50.0 % against 0.001 %)"),
                             Not(HasSubstr("of their spread")))));
  figures.recipes[2].heads[num_heads + 1].scores = 3;
  EXPECT_THAT(Verdict(figures),
              Contains(HasSubstr("where scores change by at least 300.0 % of their spread under "
                                 "both: neither keeps them")));
}

TEST(VerdictTest, SmallSharesKeepTwoDigits) {
  EXPECT_EQ(Percent(0.3404), "34.0 %");
  EXPECT_EQ(Percent(0.03404), "3.40 %");
  EXPECT_EQ(Percent(0.000034), "0.0034 %");
  EXPECT_EQ(Percent(0), "0.00 %");
}

TEST(VerdictTest, RecommendsWindowsThatDoublingWouldNotImprove) {
  ReportFigures figures = TheFigures();
  for (WindowFigures& window : figures.window_ablation) {
    window.error = window.windows.recent_tokens < 512 ? 0.5 / window.windows.recent_tokens
                                                      : 0.001;  // 512 and beyond are alike.
  }
  EXPECT_EQ(RecommendedWindows(figures)->windows,
            (Windows{.sink_tokens = 64, .recent_tokens = 512}));
  EXPECT_THAT(Verdict(figures),
              Contains(AllOf(HasSubstr("Recommended windows: the first 64 and the last 512"),
                             HasSubstr("This profile has 64 and 256"))));
}

TEST(VerdictTest, NamesTheWorstHeadsAndABetterRecipe) {
  ReportFigures figures = TheFigures();
  RecipeFigures& mine = figures.recipes.back();
  for (size_t block = 0; block < mine.heads.size(); ++block) {
    mine.heads[block].output = block == 3 ? 0.9 : 0.01;
  }
  EXPECT_EQ(HeadsByError(figures).front().layer, 1U);
  EXPECT_EQ(HeadsByError(figures).front().kv_head, 1U);
  EXPECT_THAT(Verdict(figures), Contains(HasSubstr("sits in 1 of 6 heads; the worst: layer 1 head "
                                                   "1 (90.0 %)")));
  mine.mean.output = 0.5;
  std::ranges::find(figures.recipes, "oscar-int2-tilted", &RecipeFigures::name)->mean.output = 0.1;
  EXPECT_THAT(Verdict(figures), Contains(HasSubstr("By these numbers oscar-int2-tilted")));
}

TEST(ReportJsonTest, EveryFieldIsInTheGuide) {
  const auto guide = ReadText(CRUMB_CALIBRATING_GUIDE, size_t{1} << 20);
  ASSERT_TRUE(guide.ok()) << guide.status();
  const size_t section = guide->find("## What is in the JSON files");
  ASSERT_NE(section, std::string::npos);
  const auto figures = ComputeFigures(TheStatistics(), *Fit({}), {});
  ASSERT_TRUE(figures.ok()) << figures.status();
  const std::string json = ReportJson(*figures);
  const std::regex name("\"(\\w+)\": ");
  std::set<std::string> names;
  for (std::sregex_iterator field(json.begin(), json.end(), name), end; field != end; ++field) {
    names.insert((*field)[1]);
  }
  EXPECT_THAT(names, testing::Contains("crumb_bytes"));
  for (const std::string& field : names) {
    EXPECT_TRUE(std::regex_search(guide->begin() + static_cast<ptrdiff_t>(section), guide->end(),
                                  std::regex("`\\.?" + field + "[\\[`]")))
        << field;
  }
}

TEST(ReportPageTest, IsWholeAndLoadsNothing) {
  const std::string page = ReportPage(TheFigures());
  EXPECT_THAT(page, AllOf(HasSubstr("<!doctype html>"), HasSubstr("</html>"),
                          HasSubstr("synthetic &lt;b&gt;"), Not(HasSubstr("<b>")),
                          HasSubstr("Where the loss sits"), HasSubstr("These are predictions")));
  EXPECT_THAT(page, AllOf(Not(HasSubstr("<script")), Not(HasSubstr("<link")),
                          Not(HasSubstr("src=")), Not(HasSubstr("url(")), Not(HasSubstr("nan"))));
  // The only address is SVG's name.
  EXPECT_THAT(std::regex_replace(page, std::regex("http://www.w3.org/2000/svg"), ""),
              Not(HasSubstr("http")));
  // Every element is closed.
  for (const char* name : {"svg", "text", "table", "tr", "td", "p", "polyline"}) {
    const std::string begin = std::string("<") + name + "[ >]";
    const std::string end = std::string("</") + name + ">";
    const auto count = [&page](const std::string& pattern) {
      const std::regex expression(pattern);
      return std::distance(std::sregex_iterator(page.begin(), page.end(), expression),
                           std::sregex_iterator());
    };
    EXPECT_EQ(count(begin), count(end)) << name;
  }
  EXPECT_EQ(page, ReportPage(TheFigures()));
}

TEST(ReportPageTest, TheHeatMapHasACellForEachHead) {
  const std::string page = ReportPage(TheFigures());
  EXPECT_THAT(page, AllOf(HasSubstr("<title>layer 0, KV head 0: "),
                          HasSubstr("<title>layer 2, KV head 1: "),
                          Not(HasSubstr("<title>layer 2, KV head 2: "))));
}

TEST(SvgTest, ColoursRunFromDarkToLight) {
  EXPECT_EQ(RampColor(0), "#440154");
  EXPECT_EQ(RampColor(0.5), "#21918c");
  EXPECT_EQ(RampColor(1), "#fde725");
  EXPECT_EQ(RampColor(7), RampColor(1));
}

TEST(SvgTest, OddValuesDrawWithoutNonsense) {
  const std::string chart = LineChart({.x_label = "x", .y_label = "y"},
                                      {{"zero", "#000000", {0, 0}}, {"one", "#ffffff", {1}}});
  EXPECT_THAT(chart, AllOf(Not(HasSubstr("nan")), Not(HasSubstr("inf"))));
  const std::string map =
      HeatMap({.num_rows = 1, .num_columns = 1, .row_name = "r", .column_name = "c"}, {0});
  EXPECT_THAT(map, AllOf(Not(HasSubstr("nan")), Not(HasSubstr("inf"))));
}

}  // namespace
}  // namespace crumb::calibrate
