// SPDX-License-Identifier: Apache-2.0
//
// Which recipe each head got and why: the errors of all that were tried. A profile carries them as
// text, for people who ask; nothing that reads pages does. Thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace crumb::calibrate {

// What was tried for keys (values exact) or for values (keys exact); the first is the default.
struct RecipeErrors {
  uint32_t chosen = 0;
  // By recipe, on either half of the reservoir: the squared error of queries' outputs over their
  // size, in billionths, at most 2^32 - 1. Of keys the geometric mean over queries, since the mean
  // is made by few; of values, whose errors are alike in size, the mean.
  std::vector<uint32_t> half[2];
};

struct HeadChoice {
  RecipeErrors keys;
  RecipeErrors values;
};

struct Choices {
  // By what share another recipe than the default must be better, on both halves.
  double key_margin = 0;
  double value_margin = 0;
  std::vector<std::string> key_recipes;
  std::vector<std::string> value_recipes;
  std::vector<HeadChoice> heads;  // [L, H]; empty: nothing was tried.
};

// Sets `chosen`: of the recipes that are better than the first by `margin` on both halves, the one
// with the least error over both; the first if there is none.
void Choose(double margin, RecipeErrors* errors);

// As JSON: {"key_margin", "value_margin", "key_recipes", "value_recipes", "heads": [[chosen, [..],
// [..], chosen, [..],
// [..]], ...]}. Deterministic. Empty for no heads.
std::string ChoicesText(const Choices& choices);
// INVALID_ARGUMENT: text that is not of this form, or names a recipe that was not tried. Empty text
// is empty choices.
absl::StatusOr<Choices> ParseChoices(std::string_view text);

}  // namespace crumb::calibrate
