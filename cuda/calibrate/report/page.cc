// SPDX-License-Identifier: Apache-2.0
#include "cuda/calibrate/report/page.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "cuda/calibrate/report/svg.h"
#include "cuda/calibrate/report/verdict.h"

namespace crumb::calibrate {
namespace {

constexpr char kStyle[] =
    ":root{color-scheme:light dark}"
    "body{font:16px/1.5 system-ui,sans-serif;max-width:760px;margin:2rem auto;padding:0 1rem}"
    "h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2.2rem}"
    "svg{max-width:100%;height:auto;display:block}"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums}"
    "td,th{padding:.2rem .8rem .2rem 0;text-align:left;vertical-align:top}"
    "td+td{white-space:nowrap}"
    ".note{opacity:.75;font-size:.9rem}.warn{border-left:4px solid #d55e00;padding-left:.8rem}"
    "code{font-size:.9em;overflow-wrap:anywhere}";

std::string Row(std::string_view name, std::string_view value) {
  return absl::StrCat("<tr><th>", EscapeHtml(name), "</th><td>", EscapeHtml(value), "</td></tr>\n");
}

std::string Head(const ReportFigures& figures) {
  const Geometry& geometry = figures.geometry;
  std::string html = absl::StrCat(
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
      "<meta name=\"viewport\" content=\"width=device-width\">\n<title>",
      EscapeHtml(figures.model), " at two bits</title><style>", kStyle,
      "</style></head>\n<body>\n<h1>", EscapeHtml(figures.model),
      ": what its KV cache loses at two bits</h1>\n<table>\n");
  absl::StrAppend(
      &html, Row("profile", figures.profile_id), Row("codec", figures.codec),
      Row("geometry", absl::StrCat(geometry.num_layers, " layers, ", figures.num_query_heads,
                                   " query heads, ", geometry.num_kv_heads, " KV heads, key_dim ",
                                   geometry.key_dim, ", value_dim ", geometry.value_dim)),
      Row("windows", absl::StrCat("first ", figures.windows.sink_tokens, " and last ",
                                  figures.windows.recent_tokens, " tokens in BF16")),
      Row("statistics",
          absl::StrCat(figures.num_tokens, " tokens in ", figures.num_texts, " texts")),
      "</table>\n");
  return html;
}

std::string VerdictSection(const ReportFigures& figures) {
  std::string html = "<h2>In short</h2>\n";
  for (const std::string& warning : figures.warnings) {
    absl::StrAppend(&html, "<p class=\"warn\">", EscapeHtml(warning), "</p>\n");
  }
  for (const std::string& sentence : Verdict(figures)) {
    absl::StrAppend(&html, "<p>", EscapeHtml(sentence), "</p>\n");
  }
  if (figures.is_from_rows) {
    return absl::StrCat(
        html,
        "<p class=\"warn\">These are predictions, layer by layer: rows of the texts went through "
        "the real codec, sink and recent window exact, and what each layer would lose was "
        "estimated from a sample of its keys. How losses add up through the layers is not in "
        "them.</p>\n");
  }
  return absl::StrCat(
      html,
      "<p class=\"warn\">These are predictions. Statistics hold no rows of the model, so rows were "
      "drawn from a Gaussian of each head's mean and second moment, and went through the real "
      "codec. Drawn queries and keys know nothing of each other or of their positions, and drawn "
      "values "
      "have no common part that an average would keep, so errors are larger than on text: use the "
      "numbers to compare recipes and heads.</p>\n");
}

std::string RecipeSection(const ReportFigures& figures) {
  std::vector<Bar> bars;
  for (const RecipeFigures& recipe : figures.recipes) {
    bars.push_back(
        {.name = recipe.name, .value = recipe.mean.output, .text = Percent(recipe.mean.output)});
  }
  std::string html = absl::StrCat(
      "<h2>Error of attention's output, by recipe</h2>\n", BarChart(bars),
      "<table>\n<tr><th>recipe</th><th>output</th><th>keys alone</th><th>values alone</th>"
      "<th>scores</th></tr>\n");
  for (const RecipeFigures& recipe : figures.recipes) {
    absl::StrAppend(&html, "<tr><td>", EscapeHtml(recipe.name), "<br><span class=\"note\">",
                    EscapeHtml(recipe.about), "</span></td><td>", Percent(recipe.mean.output),
                    "</td><td>", Percent(recipe.mean.keys), "</td><td>",
                    Percent(recipe.mean.values), "</td><td>", Percent(recipe.mean.scores),
                    "</td></tr>\n");
  }
  return absl::StrCat(html, "</table>\n<p class=\"note\">",
                      figures.is_from_rows ? "Squares over those of the exact thing, the geometric "
                                             "mean of each head's queries, "
                                           : "Mean squares over those of the exact thing, ",
                      "mean over all heads. Scores are q &middot; k less their mean over the keys. "
                      "All recipes take the same bytes.</p>\n");
}

// The mean over a layer's heads of one member.
std::vector<double> ByLayer(const ReportFigures& figures,
                            const RecipeFigures& recipe,
                            double AttentionError::*member) {
  const size_t num_heads = figures.geometry.num_kv_heads;
  std::vector<double> layers(figures.geometry.num_layers);
  for (size_t block = 0; block < recipe.heads.size(); ++block) {
    layers[block / num_heads] += recipe.heads[block].*member / static_cast<double>(num_heads);
  }
  return layers;
}

std::string LayerSection(const ReportFigures& figures) {
  std::vector<Series> recipes;
  for (const RecipeFigures& recipe : figures.recipes) {
    recipes.push_back({.name = recipe.name,
                       .color = CategoryColor(recipes.size()),
                       .values = ByLayer(figures, recipe, &AttentionError::output)});
  }
  const RecipeFigures& mine = ThisProfile(figures);
  const std::vector<Series> parts = {
      {"keys alone", CategoryColor(4), ByLayer(figures, mine, &AttentionError::keys)},
      {"values alone", CategoryColor(1), ByLayer(figures, mine, &AttentionError::values)}};
  std::vector<double> heads;
  for (const AttentionError& error : mine.heads) {
    heads.push_back(error.output);
  }
  return absl::StrCat(
      "<h2>Where the loss sits</h2>\n<p>This profile's output error, by layer and head.</p>\n",
      HeatMap({.num_rows = figures.geometry.num_layers,
               .num_columns = figures.geometry.num_kv_heads,
               .row_name = "layer",
               .column_name = "KV head"},
              heads),
      "<p>The same by layer, beside the other recipes.</p>\n",
      LineChart({.x_label = "layer", .y_label = "output error"}, recipes),
      "<p>This profile: what keys and values lose.</p>\n",
      LineChart({.x_label = "layer", .y_label = "output error"}, parts));
}

// A line a layer, each spectrum in units of its sum.
std::string Spectra(const std::vector<std::vector<double>>& spectra) {
  std::vector<Series> series;
  for (size_t layer = 0; layer < spectra.size(); ++layer) {
    double sum = 0;
    for (const double value : spectra[layer]) {
      sum += value;
    }
    Series one{.name = absl::StrCat("layer ", layer),
               .color = RampColor(static_cast<double>(layer) /
                                  std::max<double>(1, static_cast<double>(spectra.size()) - 1)),
               .values = spectra[layer]};
    for (double& value : one.values) {
      value = sum > 0 ? value / sum : 0;
    }
    series.push_back(std::move(one));
  }
  return LineChart(
      {.x_label = "direction, by size", .y_label = "share", .has_legend = false, .smallest = 1e-7},
      series);
}

std::string SpectrumSection(const ReportFigures& figures) {
  return absl::StrCat(
      "<h2>Spectra</h2>\n<p class=\"note\">Shares of the eigenvalues, mean over a layer's heads; "
      "dark lines are early layers, light ones late. The steeper a line, the more a rotation and "
      "attention-aware rounding can win.</p>\n<h3>Queries: what an error of a key costs</h3>\n",
      Spectra(figures.query_spectra), "<h3>Keys: their covariance</h3>\n",
      Spectra(figures.key_spectra), "<h3>Values: weighted by the attention they can get</h3>\n",
      Spectra(figures.value_spectra));
}

std::string MemorySection(const ReportFigures& figures) {
  std::string html =
      "<h2>Memory</h2>\n<table>\n<tr><th>tokens of a sequence</th><th>BF16</th>"
      "<th>two bits, windows in BF16</th><th>a token</th><th>less by</th></tr>\n";
  for (const MemoryFigures& memory : figures.memory) {
    absl::StrAppendFormat(
        &html, "<tr><td>%d</td><td>%s</td><td>%s</td><td>%s</td><td>%.2f x</td></tr>\n",
        memory.num_tokens, BytesText(memory.bf16_bytes), BytesText(memory.crumb_bytes),
        BytesText(memory.crumb_bytes / static_cast<double>(memory.num_tokens)),
        memory.bf16_bytes / memory.crumb_bytes);
  }
  return absl::StrCat(
      html,
      "</table>\n<p class=\"note\">Of all layers and heads; a live sequence holds up to 63 tokens "
      "more in BF16 until their page is full. Pages of shared prefixes are held once a "
      "node.</p>\n");
}

// A row a sink, a column a recent window.
std::string WindowSection(const ReportFigures& figures) {
  if (figures.window_ablation.empty()) {
    return {};
  }
  std::string html = absl::StrCat(
      "<h2>Windows</h2>\n<p>What is left of the error, and the memory of a sequence of ",
      kWindowTokens, " tokens, by what stays in BF16.</p>\n<table>\n");
  uint32_t sink = 0;
  for (const WindowFigures& window : figures.window_ablation) {
    if (window.windows.sink_tokens != sink) {
      absl::StrAppend(&html, sink == 0 ? "" : "</tr>\n", "<tr><th>first ",
                      window.windows.sink_tokens, "</th>");
      sink = window.windows.sink_tokens;
    }
    absl::StrAppend(&html, "<td>last ", window.windows.recent_tokens, ":<br>",
                    Percent(window.error), "<br><span class=\"note\">",
                    BytesText(window.crumb_bytes), "</span></td>");
  }
  return absl::StrCat(
      html,
      "</tr>\n</table>\n<p class=\"note\">Mean over all queries and heads of the squared "
      "error by the output's size, at most 1 each. The sample's queries are of the "
      "second halves of the texts; on longer texts a larger part is history.</p>\n");
}

void AppendRecipeCounts(const char* of,
                        const std::vector<std::string>& recipes,
                        RecipeErrors HeadChoice::*member,
                        const std::vector<HeadChoice>& heads,
                        std::string* html) {
  for (size_t recipe = 0; recipe < recipes.size(); ++recipe) {
    const auto count = std::ranges::count_if(
        heads, [&](const HeadChoice& head) { return (head.*member).chosen == recipe; });
    double log_ratio = 0;
    for (const HeadChoice& head : heads) {
      for (const std::vector<uint32_t>& half : (head.*member).half) {
        log_ratio += std::log(std::max(1.0, static_cast<double>(half[recipe])) /
                              std::max(1.0, static_cast<double>(half[0])));
      }
    }
    absl::StrAppend(
        html, "<tr><td>", of, "</td><td>", EscapeHtml(recipes[recipe]), "</td><td>", count,
        "</td><td>",
        absl::StrFormat("%.2f", std::exp(log_ratio / (2 * static_cast<double>(heads.size())))),
        "</td></tr>\n");
  }
}

// Which heads got which recipe, and the error of each that was tried beside the default's.
std::string ChoiceSection(const ReportFigures& figures) {
  const Choices& choices = figures.choices;
  if (choices.heads.empty()) {
    return {};
  }
  std::string html =
      "<h2>Recipes by head</h2>\n<table>\n<tr><th></th><th>recipe</th><th>heads</th>"
      "<th>error, default 1</th></tr>\n";
  AppendRecipeCounts("keys", choices.key_recipes, &HeadChoice::keys, choices.heads, &html);
  AppendRecipeCounts("values", choices.value_recipes, &HeadChoice::values, choices.heads, &html);
  absl::StrAppend(
      &html,
      "</table>\n<p class=\"note\">A head gets another recipe than the default if its error is "
      "lower, on either half of the rows, by ",
      Percent(choices.key_margin), " for keys and ", Percent(choices.value_margin),
      " for values. The last column is the geometric mean over all heads: what the recipe would do "
      "everywhere.</p>\n<details><summary>Heads with another recipe</summary>\n<table>\n"
      "<tr><th>layer, head</th><th>keys</th><th>values</th></tr>\n");
  for (size_t block = 0; block < choices.heads.size(); ++block) {
    const HeadChoice& head = choices.heads[block];
    if (head.keys.chosen == 0 && head.values.chosen == 0) {
      continue;
    }
    const auto cell = [](const RecipeErrors& errors, const std::vector<std::string>& recipes) {
      if (errors.chosen == 0) {
        return std::string();
      }
      const auto percent = [&](size_t half, size_t recipe) {
        return Percent(static_cast<double>(errors.half[half][recipe]) * 1e-9);
      };
      return absl::StrCat(recipes[errors.chosen], ": ", percent(0, errors.chosen), " and ",
                          percent(1, errors.chosen), " for ", percent(0, 0), " and ",
                          percent(1, 0));
    };
    absl::StrAppend(&html, "<tr><td>", block / figures.geometry.num_kv_heads, ", ",
                    block % figures.geometry.num_kv_heads, "</td><td>",
                    EscapeHtml(cell(head.keys, choices.key_recipes)), "</td><td>",
                    EscapeHtml(cell(head.values, choices.value_recipes)), "</td></tr>\n");
  }
  return absl::StrCat(html, "</table>\n</details>\n");
}

}  // namespace

std::string ReportPage(const ReportFigures& figures) {
  return absl::StrCat(
      Head(figures), VerdictSection(figures), RecipeSection(figures), LayerSection(figures),
      WindowSection(figures), ChoiceSection(figures), MemorySection(figures),
      SpectrumSection(figures),
      absl::StrCat("<p class=\"note\">By crumb-calibrate report: ", figures.num_keys, " keys and ",
                   figures.num_queries, figures.is_from_rows ? " queries" : " queries drawn",
                   " a head, the same for every recipe.</p>\n</body></html>\n"));
}

}  // namespace crumb::calibrate
