// SPDX-License-Identifier: Apache-2.0
#include "cuda/calibrate/report/page.h"
#include "cuda/calibrate/report/verdict.h"

#include <nlohmann/json.hpp>

namespace crumb::calibrate {
namespace {

using Json = nlohmann::ordered_json;

Json ErrorJson(const AttentionError& error) {
  return {{"output", error.output},
          {"keys", error.keys},
          {"values", error.values},
          {"scores", error.scores}};
}

Json RecipeJson(const RecipeFigures& recipe, size_t num_kv_heads) {
  Json layers = Json::array();
  for (size_t block = 0; block < recipe.heads.size(); ++block) {
    if (block % num_kv_heads == 0) {
      layers.push_back(Json::array());
    }
    layers.back().push_back(ErrorJson(recipe.heads[block]));
  }
  return {{"name", recipe.name},
          {"about", recipe.about},
          {"mean", ErrorJson(recipe.mean)},
          {"heads", std::move(layers)}};
}

}  // namespace

std::string ReportJson(const ReportFigures& figures) {
  const Geometry& geometry = figures.geometry;
  Json report = {
      {"format", "crumb.report.v1"},
      {"model", figures.model},
      {"profile_id", figures.profile_id},
      {"codec", figures.codec},
      {"geometry",
       {{"num_layers", geometry.num_layers},
        {"num_query_heads", figures.num_query_heads},
        {"num_kv_heads", geometry.num_kv_heads},
        {"key_dim", geometry.key_dim},
        {"value_dim", geometry.value_dim}}},
      {"windows",
       {{"sink_tokens", figures.windows.sink_tokens},
        {"recent_tokens", figures.windows.recent_tokens}}},
      {"statistics", {{"texts", figures.num_texts}, {"tokens", figures.num_tokens}}},
      {"rows",
       {{"are_drawn", !figures.is_from_rows},
        {"keys", figures.num_keys},
        {"queries", figures.num_queries}}},
      {"recipes", Json::array()},
      {"spectra",
       {{"query_moment", figures.query_spectra},
        {"key_covariance", figures.key_spectra},
        {"value_covariance", figures.value_spectra}}},
      {"memory", Json::array()},
      {"window_ablation", Json::array()},
      {"choices", Json::parse(ChoicesText(figures.choices), nullptr, false)},
      {"verdict", Verdict(figures)},
      {"warnings", figures.warnings},
  };
  for (const RecipeFigures& recipe : figures.recipes) {
    report["recipes"].push_back(RecipeJson(recipe, geometry.num_kv_heads));
  }
  for (const MemoryFigures& memory : figures.memory) {
    report["memory"].push_back({{"tokens", memory.num_tokens},
                                {"bf16_bytes", memory.bf16_bytes},
                                {"crumb_bytes", memory.crumb_bytes}});
  }
  if (figures.choices.heads.empty()) {
    report["choices"] = nullptr;
  }
  for (const WindowFigures& window : figures.window_ablation) {
    report["window_ablation"].push_back({{"sink_tokens", window.windows.sink_tokens},
                                         {"recent_tokens", window.windows.recent_tokens},
                                         {"output", window.error},
                                         {"tokens", kWindowTokens},
                                         {"crumb_bytes", window.crumb_bytes}});
  }
  // Names that are not UTF-8 have their bad bytes replaced.
  return report.dump(1, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace crumb::calibrate
