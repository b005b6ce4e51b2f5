// SPDX-License-Identifier: Apache-2.0
#include "cuda/calibrate/choices.h"

#include <utility>

#include "absl/status/status.h"

#include "proto/base/check.h"

#include <nlohmann/json.hpp>

namespace crumb::calibrate {
namespace {

using Json = nlohmann::ordered_json;

bool ReadNumbers(const Json& json, size_t count, std::vector<uint32_t>* numbers) {
  if (!json.is_array() || json.size() != count) {
    return false;
  }
  for (const Json& number : json) {
    if (!number.is_number_unsigned() || number.get<uint64_t>() > UINT32_MAX) {
      return false;
    }
    numbers->push_back(number.get<uint32_t>());
  }
  return true;
}

// Three elements of a head's array from `first` on.
bool ReadErrors(const Json& head, size_t first, size_t num_recipes, RecipeErrors* errors) {
  const Json& chosen = head[first];
  if (!chosen.is_number_unsigned() || chosen.get<uint64_t>() >= num_recipes) {
    return false;
  }
  errors->chosen = chosen.get<uint32_t>();
  return ReadNumbers(head[first + 1], num_recipes, &errors->half[0]) &&
         ReadNumbers(head[first + 2], num_recipes, &errors->half[1]);
}

bool ReadNames(const Json& json, const char* key, std::vector<std::string>* names) {
  const auto found = json.find(key);
  if (found == json.end() || !found->is_array()) {
    return false;
  }
  for (const Json& name : *found) {
    if (!name.is_string()) {
      return false;
    }
    names->push_back(name.get<std::string>());
  }
  return true;
}

bool ReadMargin(const Json& json, const char* key, double* margin) {
  const auto found = json.find(key);
  if (found == json.end() || !found->is_number()) {
    return false;
  }
  *margin = found->get<double>();
  return true;
}

bool Read(const Json& json, Choices* choices) {
  if (!json.is_object() || !ReadMargin(json, "key_margin", &choices->key_margin) ||
      !ReadMargin(json, "value_margin", &choices->value_margin) ||
      !ReadNames(json, "key_recipes", &choices->key_recipes) ||
      !ReadNames(json, "value_recipes", &choices->value_recipes) || !json.contains("heads") ||
      !json["heads"].is_array()) {
    return false;
  }
  for (const Json& head : json["heads"]) {
    HeadChoice choice;
    if (!head.is_array() || head.size() != 6 ||
        !ReadErrors(head, 0, choices->key_recipes.size(), &choice.keys) ||
        !ReadErrors(head, 3, choices->value_recipes.size(), &choice.values)) {
      return false;
    }
    choices->heads.push_back(std::move(choice));
  }
  return true;
}

}  // namespace

void Choose(double margin, RecipeErrors* errors) {
  CRUMB_CHECK(errors->half[0].size() == errors->half[1].size(), "both halves of each recipe");
  errors->chosen = 0;
  uint64_t least = 0;
  for (uint32_t recipe = 1; recipe < errors->half[0].size(); ++recipe) {
    bool is_better = true;
    uint64_t sum = 0;
    for (const std::vector<uint32_t>& half : errors->half) {
      is_better &= half[recipe] < (1 - margin) * half[0];
      sum += half[recipe];
    }
    if (is_better && (errors->chosen == 0 || sum < least)) {
      errors->chosen = recipe;
      least = sum;
    }
  }
}

std::string ChoicesText(const Choices& choices) {
  if (choices.heads.empty()) {
    return {};
  }
  Json heads = Json::array();
  for (const HeadChoice& head : choices.heads) {
    heads.push_back({head.keys.chosen, head.keys.half[0], head.keys.half[1], head.values.chosen,
                     head.values.half[0], head.values.half[1]});
  }
  return Json{{"key_margin", choices.key_margin},
              {"value_margin", choices.value_margin},
              {"key_recipes", choices.key_recipes},
              {"value_recipes", choices.value_recipes},
              {"heads", std::move(heads)}}
      .dump();
}

absl::StatusOr<Choices> ParseChoices(std::string_view text) {
  Choices choices;
  if (text.empty()) {
    return choices;
  }
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded() || !Read(json, &choices)) {
    return absl::InvalidArgumentError(
        "the profile's metadata 'choices' are not of crumb-calibrate fit; they are for people "
        "alone, so the profile may be used");
  }
  return choices;
}

}  // namespace crumb::calibrate
