// SPDX-License-Identifier: Apache-2.0
#include "cuda/calibrate/report/verdict.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace crumb::calibrate {
namespace {

const RecipeFigures* FindRecipe(const ReportFigures& figures, const char* name) {
  const auto found = std::ranges::find(figures.recipes, name, &RecipeFigures::name);
  return found == figures.recipes.end() ? nullptr : &*found;
}

std::string Loss(const ReportFigures& figures) {
  const RecipeFigures& mine = ThisProfile(figures);
  std::string text = absl::StrCat(
      figures.is_from_rows
          ? "With this profile the error of attention's output on rows of the texts is "
          : "With this profile the predicted error of attention's output is ",
      Percent(mine.mean.output),
      figures.is_from_rows ? " (squares, of a typical query, mean over heads)"
                           : " (mean square, mean over heads)");
  for (const char* name : {"naive", "oscar-int2"}) {
    const RecipeFigures* other = FindRecipe(figures, name);
    if (other != nullptr) {
      absl::StrAppend(
          &text,
          other->name == "naive" ? "; plain rounding would lose " : ", the recipe as published ",
          Percent(other->mean.output));
    }
  }
  return absl::StrCat(text, ".");
}

// The head that makes most of the difference between two recipes, and whether either keeps its
// scores at all.
std::string WorstExample(const ReportFigures& figures,
                         const RecipeFigures& worse,
                         const RecipeFigures& better) {
  size_t worst = 0;
  const auto loss = [&](size_t block) {
    return worse.heads[block].output - better.heads[block].output;
  };
  for (size_t block = 1; block < worse.heads.size(); ++block) {
    worst = loss(block) > loss(worst) ? block : worst;
  }
  const double scores = std::min(worse.heads[worst].scores, better.heads[worst].scores);
  return absl::StrCat(
      ", most of it in layer ", worst / figures.geometry.num_kv_heads, " head ",
      worst % figures.geometry.num_kv_heads, " (", Percent(worse.heads[worst].output), " against ",
      Percent(better.heads[worst].output), ")",
      scores > 1 ? absl::StrCat(", where scores change by at least ", Percent(scores),
                                " of their spread under both: neither keeps them, and which is "
                                "worse says little")
                 : "");
}

// Why a recipe is no better than another: its keys or its values, and in how many heads.
std::string Cause(const ReportFigures& figures,
                  const RecipeFigures& worse,
                  const RecipeFigures& better) {
  size_t heads = 0;
  for (size_t block = 0; block < worse.heads.size(); ++block) {
    heads += worse.heads[block].output >= better.heads[block].output ? size_t{1} : size_t{0};
  }
  const bool is_by_keys =
      worse.mean.keys - better.mean.keys > worse.mean.values - better.mean.values;
  return absl::StrCat("by ", is_by_keys ? "keys" : "values", ", in ", heads, " of ",
                      worse.heads.size(), " heads",
                      worse.name == "clip" && is_by_keys
                          ? ": a channel that sticks out in every key is no outlier, and cutting "
                            "it changes the scores"
                          : WorstExample(figures, worse, better));
}

// Whether each recipe's mean error is below the one's before it.
std::string Order(const ReportFigures& figures) {
  std::vector<std::string> names;
  std::vector<std::string> exceptions;
  for (size_t i = 0; i + 1 < figures.recipes.size(); ++i) {
    const RecipeFigures& recipe = figures.recipes[i];
    names.push_back(recipe.name);
    if (i > 0 && recipe.mean.output >= figures.recipes[i - 1].mean.output) {
      exceptions.push_back(absl::StrCat(recipe.name, " (", Percent(recipe.mean.output),
                                        ") is no better than ", figures.recipes[i - 1].name, " (",
                                        Percent(figures.recipes[i - 1].mean.output), "), ",
                                        Cause(figures, recipe, figures.recipes[i - 1])));
    }
  }
  const std::string order = absl::StrJoin(names, " > ");
  return exceptions.empty()
             ? absl::StrCat("The recipes come out in the expected order of error: ", order, ".")
             : absl::StrCat("The expected order of error, ", order,
                            ", does not hold here: ", absl::StrJoin(exceptions, "; "),
                            figures.is_from_rows
                                ? ". The rows are a sample, so a difference of a tenth may be "
                                  "chance; a larger one is this model's own."
                                : ". Rows are drawn, so a small difference may be chance, and a "
                                  "large one is a reason to measure both on text.");
}

std::string Concentration(const ReportFigures& figures) {
  const std::vector<WorstHead> heads = HeadsByError(figures);
  double total = 0;
  for (const WorstHead& head : heads) {
    total += head.output_error;
  }
  size_t half = 0;
  for (double sum = 0; half < heads.size() && sum < total / 2; ++half) {
    sum += heads[half].output_error;
  }
  std::vector<std::string> worst;
  for (size_t i = 0; i < std::min<size_t>(3, heads.size()); ++i) {
    worst.push_back(absl::StrCat("layer ", heads[i].layer, " head ", heads[i].kv_head, " (",
                                 Percent(heads[i].output_error), ")"));
  }
  return absl::StrCat("Half of the loss sits in ", half, " of ", heads.size(),
                      " heads; the worst: ", absl::StrJoin(worst, ", "), ".");
}

std::string KeysOrValues(const ReportFigures& figures) {
  const AttentionError& mean = ThisProfile(figures).mean;
  return absl::StrCat(
      "Rounding only keys would lose ", Percent(mean.keys), ", only values ", Percent(mean.values),
      ": ", mean.keys > mean.values ? "keys are the larger part." : "values are the larger part.");
}

const WindowFigures* FindWindows(const ReportFigures& figures, uint32_t sink, uint32_t recent) {
  const auto found =
      std::ranges::find_if(figures.window_ablation, [&](const WindowFigures& window) {
        return window.windows.sink_tokens == sink && window.windows.recent_tokens == recent;
      });
  return found == figures.window_ablation.end() ? nullptr : &*found;
}

// Whether doubling a window to `other` spares enough to be worth it.
bool SparesMuch(const WindowFigures& window, const WindowFigures* other) {
  return other != nullptr && other->error < window.error * 2 / 3;
}

// One sentence, or none without an ablation.
std::string WindowAdvice(const ReportFigures& figures) {
  const WindowFigures* best = RecommendedWindows(figures);
  if (best == nullptr) {
    return {};
  }
  const auto [sink, recent] = best->windows;
  std::string text = absl::StrCat("Recommended windows: the first ", sink, " and the last ", recent,
                                  " tokens in BF16, which leave an error of ", Percent(best->error),
                                  " (mean over queries)");
  if (const WindowFigures* wider = FindWindows(figures, sink, 2 * recent); wider != nullptr) {
    absl::StrAppend(&text, "; twice the recent window would leave ", Percent(wider->error),
                    " for another ", BytesText(wider->crumb_bytes - best->crumb_bytes),
                    " a sequence");
  }
  if (const WindowFigures* narrower = FindWindows(figures, sink, recent / 2); narrower != nullptr) {
    absl::StrAppend(&text, "; half of it ", Percent(narrower->error));
  }
  return absl::StrCat(text, figures.windows == best->windows
                                ? ". This profile has them."
                                : absl::StrCat(". This profile has ", figures.windows.sink_tokens,
                                               " and ", figures.windows.recent_tokens, "."));
}

std::string Savings(const ReportFigures& figures) {
  const MemoryFigures& longest = figures.memory.back();
  const auto bf16 = static_cast<double>(figures.geometry.PageBytes(PageEncoding::kBf16));
  const auto int2 = static_cast<double>(figures.geometry.PageBytes(PageEncoding::kInt2));
  return absl::StrFormat(
      "A token of history takes %s where BF16 takes %s (%.1f times less); a sequence of %d tokens, "
      "its windows of %d + %d tokens in BF16 included, %s instead of %s (%.1f times less).",
      BytesText(int2 / kPageTokens), BytesText(bf16 / kPageTokens), bf16 / int2, longest.num_tokens,
      figures.windows.sink_tokens, figures.windows.recent_tokens, BytesText(longest.crumb_bytes),
      BytesText(longest.bf16_bytes), longest.bf16_bytes / longest.crumb_bytes);
}

std::string NextStep(const ReportFigures& figures) {
  const RecipeFigures* best = &figures.recipes.front();
  for (const RecipeFigures& recipe : figures.recipes) {
    best = recipe.mean.output < best->mean.output ? &recipe : best;
  }
  const double mine = ThisProfile(figures).mean.output;
  // Below a tenth, the draw decides.
  if (best->mean.output < 0.9 * mine) {
    return absl::StrCat("By these numbers ", best->name, " would be better (",
                        Percent(best->mean.output), " against ", Percent(mine),
                        "): fit it as well, and compare perplexity on texts of your own.");
  }
  return "No recipe here is clearly better. Before you serve with it, compare perplexity with BF16 "
         "on texts of your own: these numbers rank recipes and heads, they do not promise quality.";
}

}  // namespace

std::vector<WorstHead> HeadsByError(const ReportFigures& figures) {
  std::vector<WorstHead> heads;
  const std::vector<AttentionError>& errors = ThisProfile(figures).heads;
  for (size_t block = 0; block < errors.size(); ++block) {
    heads.push_back({.layer = static_cast<uint32_t>(block / figures.geometry.num_kv_heads),
                     .kv_head = static_cast<uint32_t>(block % figures.geometry.num_kv_heads),
                     .output_error = errors[block].output});
  }
  std::ranges::stable_sort(heads, std::ranges::greater(), &WorstHead::output_error);
  return heads;
}

const WindowFigures* RecommendedWindows(const ReportFigures& figures) {
  const Windows least;  // The defaults.
  for (const WindowFigures& window : figures.window_ablation) {
    const auto [sink, recent] = window.windows;
    if (sink >= least.sink_tokens && recent >= least.recent_tokens &&
        !SparesMuch(window, FindWindows(figures, sink, 2 * recent)) &&
        !SparesMuch(window, FindWindows(figures, 2 * sink, recent))) {
      return &window;
    }
  }
  return figures.window_ablation.empty() ? nullptr : &figures.window_ablation.back();
}

std::vector<std::string> Verdict(const ReportFigures& figures) {
  std::vector<std::string> sentences = {Loss(figures), Order(figures), Concentration(figures),
                                        KeysOrValues(figures)};
  if (std::string advice = WindowAdvice(figures); !advice.empty()) {
    sentences.push_back(std::move(advice));
  }
  sentences.push_back(Savings(figures));
  sentences.push_back(NextStep(figures));
  return sentences;
}

std::string Percent(double share) {
  return share >= 0.1                   ? absl::StrFormat("%.1f %%", share * 100)
         : share >= 0.001 || share == 0 ? absl::StrFormat("%.2f %%", share * 100)
                                        : absl::StrFormat("%.2g %%", share * 100);
}

std::string BytesText(double bytes) {
  const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  while (bytes >= 1024 && unit + 1 < std::size(units)) {
    bytes /= 1024;
    ++unit;
  }
  return absl::StrFormat("%.4g %s", bytes, units[unit]);
}

}  // namespace crumb::calibrate
