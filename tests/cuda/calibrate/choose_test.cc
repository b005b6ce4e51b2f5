// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <span>
#include <string>

#include "crumb/cuda/fit_profile.h"
#include "cuda/calibrate/attention_mass.h"
#include "cuda/calibrate/choices.h"
#include "cuda/calibrate/reservoir_probe.h"
#include "tests/cuda/calibrate/synthetic.h"

namespace crumb::calibrate {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

constexpr uint32_t kDim = 32;
constexpr size_t kTokens = 700;

const SyntheticModel kModel{
    .geometry = {.num_layers = 2, .num_kv_heads = 2, .key_dim = kDim, .value_dim = kDim},
    .num_query_heads = 4};

Statistics StatisticsOf(uint32_t num_texts) {
  auto collector = StatisticsCollector::Create(
      {.model = "synthetic", .geometry = kModel.geometry, .num_query_heads = 4});
  for (uint32_t text = 0; text < num_texts; ++text) {
    for (uint32_t layer = 0; layer < 2; ++layer) {
      const SyntheticText rows = kModel.Text(layer, kTokens, text);
      EXPECT_TRUE(collector->AddText(layer, rows.queries, rows.keys, rows.values).ok());
    }
  }
  return *collector->Finish();
}

// shared: as Profile::Parse returns it.
std::shared_ptr<const Profile> Fitted(const Statistics& statistics, const FitOptions& options) {
  const auto fitted = FitProfile(statistics, options);
  EXPECT_TRUE(fitted.ok()) << fitted.status();
  const auto file = Profile::Serialize(fitted->parts);
  EXPECT_TRUE(file.ok()) << file.status();
  return *Profile::Parse(*file);
}

// ---- the rule

TEST(ChooseTest, AnotherRecipeMustBeBetterOnBothHalves) {
  const auto chosen = [](std::vector<uint32_t> a, std::vector<uint32_t> b) {
    RecipeErrors errors{.half = {std::move(a), std::move(b)}};
    Choose(0.1, &errors);
    return errors.chosen;
  };
  EXPECT_EQ(chosen({100, 80, 70}, {100, 80, 70}), 2U);
  EXPECT_EQ(chosen({100, 80, 20}, {100, 80, 95}), 1U);  // The last is better on one half alone.
  EXPECT_EQ(chosen({100, 91}, {100, 80}), 0U);          // By less than a tenth on the first.
  EXPECT_EQ(chosen({100, 120, 100}, {100, 90, 100}), 0U);
  EXPECT_EQ(chosen({0, 0}, {0, 0}), 0U);
  EXPECT_EQ(chosen({7}, {7}), 0U);
}

TEST(ChoicesTest, TextKeepsThem) {
  Choices choices{.key_margin = 0.25,
                  .value_margin = 0.5,
                  .key_recipes = {"a", "b \"c\""},
                  .value_recipes = {"d"},
                  .heads = {}};
  choices.heads.push_back({.keys = {.chosen = 1, .half = {{10, 4'000'000'000}, {3, 4}}},
                           .values = {.chosen = 0, .half = {{5}, {6}}}});
  const auto read = ParseChoices(ChoicesText(choices));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->key_margin, 0.25);
  EXPECT_EQ(read->value_margin, 0.5);
  EXPECT_THAT(read->key_recipes, ElementsAre("a", "b \"c\""));
  ASSERT_THAT(read->heads, SizeIs(1));
  EXPECT_EQ(read->heads[0].keys.chosen, 1U);
  EXPECT_THAT(read->heads[0].keys.half[0], ElementsAre(10, 4'000'000'000));
  EXPECT_THAT(read->heads[0].values.half[1], ElementsAre(6));
  EXPECT_THAT(ParseChoices("")->heads, IsEmpty());
  EXPECT_EQ(ChoicesText({}), "");
}

TEST(ChoicesTest, OtherTextIsRefused) {
  const std::string begin = R"({"key_margin":0,"value_margin":0,"key_recipes":)";
  const std::string heads = R"(["a"],"value_recipes":["a"],"heads":[)";
  for (const std::string& text :
       {std::string("{"), std::string("[]"), std::string("{}"), std::string("null"),
        begin + R"([1],"value_recipes":[],"heads":[]})", begin + heads + "[1,[1],[1],0,[1],[1]]]}",
        begin + heads + "[0,[1],[1],0,[1]]]}", begin + heads + "[0,[-1],[1],0,[1],[1]]]}",
        begin + heads + "[0,[1,2],[1],0,[1],[1]]]}"}) {
    EXPECT_THAT(std::string(ParseChoices(text).status().message()), HasSubstr("'choices'")) << text;
  }
  EXPECT_TRUE(ParseChoices(begin + heads + "[0,[1],[1],0,[1],[1]]]}").ok());
}

// ---- the measure

TEST(ReservoirProbeTest, ExactRowsLoseNothing) {
  const Statistics statistics = StatisticsOf(2);
  const ReservoirProbe probe(statistics, 1);
  const size_t rows = statistics.reservoir.key_tokens.size() * kDim;
  const auto head = [&](const std::vector<float>& all) {
    return std::vector<float>(all.begin() + static_cast<ptrdiff_t>(rows),
                              all.begin() + static_cast<ptrdiff_t>(2 * rows));
  };
  const StoredRows exact{.keys = head(statistics.reservoir.keys),
                         .values = head(statistics.reservoir.values)};
  const HalvesError error = probe.Measure(exact, {});
  EXPECT_LT(error.all.output, 1e-9);
  EXPECT_LT(error.half[0].scores, 1e-9);
}

// The estimate from the sample beside attention over all keys of the texts, head by head.
TEST(ReservoirProbeTest, EstimatesTheErrorOfAttentionOverWholeTexts) {
  const Statistics statistics = StatisticsOf(2);
  const auto profile = Fitted(statistics, {.codec = CodecId::kOscarInt2, .choose = false});
  const Windows windows{.sink_tokens = 64, .recent_tokens = 128};
  for (size_t block = 0; block < 4; ++block) {
    const HeadParameters& head =
        profile->head(static_cast<uint32_t>(block / 2), static_cast<uint32_t>(block % 2));
    double change = 0;
    double size = 0;
    for (uint32_t number = 0; number < 2; ++number) {
      const SyntheticText text = kModel.Text(static_cast<uint32_t>(block / 2), kTokens, number);
      const TokenRows queries{"queries", text.queries, 4, kDim};
      const TokenRows keys{"keys", text.keys, 2, kDim};
      const TokenRows values{"values", text.values, 2, kDim};
      RowsF32 k = ViewHead(keys, block % 2, 0);
      RowsF32 v = ViewHead(values, block % 2, 0);
      const size_t padded = (kTokens + 63) / 64 * 64;
      std::vector<float> key_rows(k.data(), k.data() + k.size());
      std::vector<float> value_rows(v.data(), v.data() + v.size());
      key_rows.resize(padded * kDim);
      value_rows.resize(padded * kDim);
      const auto stored = ThroughPages(head, key_rows, value_rows);
      ASSERT_TRUE(stored.ok());
      for (size_t position = kTokens / 2; position < kTokens; ++position) {
        RowsF32 k_used = k;
        RowsF32 v_used = v;
        const size_t end = (position + 1 - windows.recent_tokens) / 64 * 64;
        for (size_t row = 64; row < end; ++row) {
          for (size_t i = 0; i < kDim; ++i) {
            const auto r = static_cast<Eigen::Index>(row);
            const auto c = static_cast<Eigen::Index>(i);
            k_used(r, c) = stored->keys[row * kDim + i];
            v_used(r, c) = stored->values[row * kDim + i];
          }
        }
        const auto view = [](const RowsF32& rows) {
          return HeadView(rows.data(), rows.rows(), rows.cols(), Eigen::OuterStride<>(kDim));
        };
        std::vector<float> exact(kDim);
        std::vector<float> changed(kDim);
        const auto query = queries.Row(position, 2 * (block % 2) + position % 2);
        Attend(query, position, 0, view(k), view(v), exact);
        Attend(query, position, 0, view(k_used), view(v_used), changed);
        for (size_t i = 0; i < kDim; ++i) {
          change += std::pow(double{changed[i]} - double{exact[i]}, 2);
          size += std::pow(double{exact[i]}, 2);
        }
      }
    }
    const ReservoirProbe probe(statistics, block);
    const auto stored = probe.Store(head);
    ASSERT_TRUE(stored.ok());
    const HalvesError estimate = probe.Measure(*stored, windows);
    // 256 of 636 keys and 64 of 350 queries a text.
    EXPECT_NEAR(estimate.all.output, change / size, 0.5 * change / size) << "block " << block;
    EXPECT_GT(estimate.half[0].output, 0.4 * change / size);
    EXPECT_GT(estimate.half[1].output, 0.4 * change / size);
  }
}

TEST(ReservoirProbeTest, WiderWindowsLoseLess) {
  const Statistics statistics = StatisticsOf(2);
  const auto profile = Fitted(statistics, {.codec = CodecId::kOscarInt2, .choose = false});
  const ReservoirProbe probe(statistics, 0);
  const auto stored = probe.Store(profile->head(0, 0));
  ASSERT_TRUE(stored.ok());
  const auto output = [&](uint32_t sink, uint32_t recent) {
    return probe.Measure(*stored, {.sink_tokens = sink, .recent_tokens = recent}).all.output;
  };
  EXPECT_LT(output(64, 256), output(64, 64));
  EXPECT_LT(output(256, 64), output(64, 64));
  EXPECT_EQ(output(64, 1024), 0);
}

// ---- the choice of a fit

TEST(ChooseHeadsTest, EachHeadSaysWhatWasTriedAndTheProfileKeepsIt) {
  const Statistics statistics = StatisticsOf(3);
  const auto profile = Fitted(statistics, {.num_threads = 2});
  const auto choices = ParseChoices(profile->choices());
  ASSERT_TRUE(choices.ok()) << choices.status();
  EXPECT_EQ(choices->key_margin, 0.5);
  EXPECT_EQ(choices->value_margin, 0.1);
  EXPECT_THAT(choices->key_recipes,
              ElementsAre("default", "Hadamard alone", "a rotation a layer", "not scaled",
                          "not shifted", "no feedback", "ten times the damping"));
  ASSERT_THAT(choices->heads, SizeIs(4));
  for (const HeadChoice& head : choices->heads) {
    for (size_t half = 0; half < 2; ++half) {
      ASSERT_THAT(head.keys.half[half], SizeIs(7));
      ASSERT_THAT(head.values.half[half], SizeIs(choices->value_recipes.size()));
      // These keys have a large mean and loud channels, and their queries a steep spectrum.
      EXPECT_LT(head.keys.half[half][0], head.keys.half[half][5]);
    }
  }
}

TEST(ChooseHeadsTest, ThreadsChangeNothing) {
  const Statistics statistics = StatisticsOf(2);
  const auto one = FitProfile(statistics, {.num_threads = 1});
  const auto two = FitProfile(statistics, {.num_threads = 2});
  ASSERT_TRUE(one.ok() && two.ok());
  EXPECT_EQ(*Profile::Serialize(one->parts), *Profile::Serialize(two->parts));
}

TEST(ChooseHeadsTest, WithoutRowsOrWithoutTheWishAllHeadsAreAlike) {
  Statistics statistics = StatisticsOf(2);
  const auto plain = FitProfile(statistics, {.choose = false});
  statistics.reservoir = {};
  const auto rowless = FitProfile(statistics, {});
  ASSERT_TRUE(plain.ok() && rowless.ok());
  EXPECT_THAT(plain->parts.choices, IsEmpty());
  EXPECT_EQ(*Profile::Serialize(plain->parts), *Profile::Serialize(rowless->parts));
}

// A head whose recipe would do harm gets another one.
TEST(ChooseHeadsTest, AHeadThatLosesByTheDefaultGetsAnother) {
  Statistics statistics = StatisticsOf(2);
  // Values that are all their first channel: whoever clips to 0.92 loses most of them.
  for (size_t row = 0; row < statistics.reservoir.key_tokens.size(); ++row) {
    float* value = statistics.reservoir.values.data() + row * kDim;
    for (size_t i = 0; i < kDim; ++i) {
      value[i] *= i == 0 ? 30.0F : 0.1F;
    }
  }
  std::fill_n(statistics.value_covariance.begin(), kDim * kDim, 0.0);
  for (size_t i = 0; i < kDim; ++i) {  // And a covariance that knows nothing of that.
    statistics.value_covariance[i * (kDim + 1)] = 1 + static_cast<double>(i == 5);
  }
  const auto fitted = FitProfile(statistics, {});
  ASSERT_TRUE(fitted.ok()) << fitted.status();
  const auto choices = ParseChoices(fitted->parts.choices);
  ASSERT_TRUE(choices.ok());
  const RecipeErrors& values = choices->heads[0].values;
  for (size_t recipe = 0; recipe < values.half[0].size(); ++recipe) {
    if (values.half[0][recipe] < 0.9 * values.half[0][0] &&
        values.half[1][recipe] < 0.9 * values.half[1][0]) {
      EXPECT_NE(values.chosen, 0U);
    }
  }
  EXPECT_LE(values.half[0][values.chosen], values.half[0][0]);
}

}  // namespace
}  // namespace crumb::calibrate
