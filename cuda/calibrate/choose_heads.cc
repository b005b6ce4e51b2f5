// SPDX-License-Identifier: Apache-2.0
#include "cuda/calibrate/choose_heads.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <span>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"

#include "cuda/calibrate/reservoir_probe.h"
#include "proto/base/status_macros.h"

namespace crumb::calibrate {
namespace {

struct NamedKeys {
  std::string name;
  KeyRecipe recipe;
};

enum class ValueBasis : uint8_t { kEnergy, kAttention, kHadamard, kLayer };

struct NamedValues {
  std::string name;
  ValueBasis basis = ValueBasis::kEnergy;
  float clip = 0;
  bool by_deviation = false;  // Then without a clip.
};

// The default first, then what changes one thing of it.
std::vector<NamedKeys> KeyRecipes(const FitOptions& options, bool choose) {
  const KeyRecipe base{
      .rotation = options.key_rotation,
      .shift = options.shift_keys,
      .damping = options.damping,
      .ranges = options.key_ranges == KeyRangeSet::kNarrow ? kNarrowKeyRanges : crumb::kKeyRanges};
  std::vector<NamedKeys> recipes = {{"default", base}};
  const auto add = [&](const char* name, auto change) {
    KeyRecipe recipe = base;
    change(&recipe);
    recipes.push_back({name, recipe});
  };
  if (!choose) {
    return recipes;
  }
  if (base.rotation != RotationKind::kHadamard) {
    add("Hadamard alone", [](KeyRecipe* r) { r->rotation = RotationKind::kHadamard; });
    add("a rotation a layer", [](KeyRecipe* r) { r->rotation = RotationKind::kPerLayer; });
  }
  add("not scaled", [](KeyRecipe* r) { r->scale = false; });
  if (base.shift) {
    add("not shifted", [](KeyRecipe* r) { r->shift = false; });
  }
  add("no feedback", [](KeyRecipe* r) { r->feedback = false; });
  add("ten times the damping", [](KeyRecipe* r) { r->damping = std::min(1.0, 10 * r->damping); });
  if (options.key_ranges == KeyRangeSet::kChosen) {
    add("narrow ranges", [](KeyRecipe* r) { r->ranges = kNarrowKeyRanges; });
    add("wide ranges", [](KeyRecipe* r) { r->ranges = kWideKeyRanges; });
  }
  return recipes;
}

std::vector<NamedValues> ValueRecipes(const FitOptions& options, bool choose) {
  const ValueBasis basis = options.value_rotation == RotationKind::kHadamard ? ValueBasis::kHadamard
                           : options.value_rotation == RotationKind::kPerLayer
                               ? ValueBasis::kLayer
                               : ValueBasis::kEnergy;
  const bool by_deviation = options.value_levels == ValueLevels::kDeviation;
  const float clip = by_deviation ? 0 : options.value_clip;
  std::vector<NamedValues> recipes = {{"default", basis, clip, by_deviation}};
  if (!choose) {
    return recipes;
  }
  if (basis != ValueBasis::kHadamard) {
    recipes.push_back({"Hadamard alone", ValueBasis::kHadamard, clip, by_deviation});
  }
  recipes.push_back({"rotation by attention", ValueBasis::kAttention, clip, by_deviation});
  for (const float ratio : {0.97F, 0.95F, 0.90F, 0.87F}) {
    recipes.push_back({absl::StrCat("clip ", ratio), basis, ratio});
  }
  return recipes;
}

absl::Status AtHead(const absl::Status& status, uint32_t layer, uint32_t head) {
  return status.ok() ? status
                     : absl::InvalidArgumentError(absl::StrCat("fit: layer ", layer, ", KV head ",
                                                               head, ": ", status.message()));
}

uint32_t Billionths(double error) {
  const double count = std::round(error * 1e9);
  return count < 4e9 ? static_cast<uint32_t>(count) : std::numeric_limits<uint32_t>::max();
}

DoubleMatrix MeanOf(const std::vector<DoubleMatrix>& matrices) {
  DoubleMatrix mean(matrices[0].size());
  for (const DoubleMatrix& matrix : matrices) {
    for (size_t i = 0; i < mean.size(); ++i) {
      mean[i] += matrix[i] / static_cast<double>(matrices.size());
    }
  }
  return mean;
}

// Fits the heads of one layer.
class LayerChooser {
 public:
  LayerChooser(const Statistics& statistics, const FitOptions& options, uint32_t layer)
      : statistics_(statistics),
        options_(options),
        layer_(layer),
        chooses_(options.choose && !statistics.reservoir.empty()),
        key_recipes_(KeyRecipes(options, chooses_)),
        value_recipes_(ValueRecipes(options, chooses_)) {}

  absl::Status Run(std::span<FittedHead> heads, std::span<HeadChoice> choices);

 private:
  size_t Block(uint32_t head) const {
    return size_t{layer_} * statistics_.geometry.num_kv_heads + head;
  }
  absl::Status FitLayerMoments();
  absl::StatusOr<FloatMatrix> FitValueRotation(size_t block, ValueBasis basis) const;
  absl::Status FitHead(uint32_t head, FittedHead* fitted, HeadChoice* choice) const;
  HeadParameters Parameters(const FittedKeys& keys,
                            const FloatMatrix& value_rotation,
                            const NamedValues& values) const;

  const Statistics& statistics_;
  const FitOptions& options_;
  const uint32_t layer_;
  const bool chooses_;
  const std::vector<NamedKeys> key_recipes_;
  const std::vector<NamedValues> value_recipes_;
  DoubleMatrix layer_metric_;  // Of keys; empty unless a recipe needs it.
  DoubleMatrix layer_values_;
};

absl::Status LayerChooser::FitLayerMoments() {
  const Geometry& geometry = statistics_.geometry;
  const bool needs_metric = std::ranges::any_of(key_recipes_, [](const NamedKeys& keys) {
    return keys.recipe.rotation == RotationKind::kPerLayer;
  });
  std::vector<DoubleMatrix> metrics;
  std::vector<DoubleMatrix> values;
  for (uint32_t head = 0; head < geometry.num_kv_heads; ++head) {
    if (needs_metric) {
      auto metric = ScaledMetric(statistics_, Block(head), options_.shift_keys);
      CRUMB_RETURN_IF_ERROR(AtHead(metric.status(), layer_, head));
      metrics.push_back(*std::move(metric));
    }
    const auto moment = BlockOf(statistics_.value_covariance, Block(head),
                                size_t{geometry.value_dim} * geometry.value_dim);
    values.emplace_back(moment.begin(), moment.end());
  }
  layer_values_ = MeanOf(values);
  if (needs_metric) {
    layer_metric_ = MeanOf(metrics);
  }
  return absl::OkStatus();
}

absl::StatusOr<FloatMatrix> LayerChooser::FitValueRotation(size_t block, ValueBasis basis) const {
  const size_t dim = statistics_.geometry.value_dim;
  if (basis == ValueBasis::kHadamard) {
    return ToFloat(Hadamard(dim));
  }
  const std::span<const double> moment =
      basis == ValueBasis::kLayer ? std::span<const double>(layer_values_)
      : basis == ValueBasis::kAttention
          ? BlockOf(statistics_.value_attention_covariance, block, dim * dim)
          : BlockOf(statistics_.value_covariance, block, dim * dim);
  CRUMB_ASSIGN_OR_RETURN(const DoubleMatrix rotation, OscarRotation(moment, dim));
  return ToFloat(rotation);
}

HeadParameters LayerChooser::Parameters(const FittedKeys& keys,
                                        const FloatMatrix& value_rotation,
                                        const NamedValues& values) const {
  return {.key_dim = statistics_.geometry.key_dim,
          .value_dim = statistics_.geometry.value_dim,
          .codec = CodecId::kOscarInt2Tilted,
          .key_rotation = keys.rotation.data(),
          .query_rotation = keys.query_rotation.data(),
          .value_rotation = value_rotation.data(),
          .key_mean = keys.mean.data(),
          .key_feedback = keys.feedback.data(),
          .key_metric = keys.metric.data(),
          .query_mean = keys.query_mean.data(),
          .key_clip = 0,
          .value_clip = values.clip,
          .values_by_deviation = values.by_deviation,
          .key_ranges = keys.ranges};
}

absl::Status LayerChooser::FitHead(uint32_t head, FittedHead* fitted, HeadChoice* choice) const {
  std::vector<FittedKeys> keys;
  std::vector<FloatMatrix> rotations;
  for (const NamedKeys& recipe : key_recipes_) {
    CRUMB_ASSIGN_OR_RETURN(FittedKeys one,
                           FitKeys(statistics_, Block(head), recipe.recipe, layer_metric_));
    keys.push_back(std::move(one));
  }
  for (const NamedValues& recipe : value_recipes_) {
    CRUMB_ASSIGN_OR_RETURN(FloatMatrix one, FitValueRotation(Block(head), recipe.basis));
    rotations.push_back(std::move(one));
  }
  if (chooses_) {
    const ReservoirProbe probe(statistics_, Block(head));
    // The i-th of both at once: errors are told apart by what is left exact.
    for (size_t i = 0; i < std::max(keys.size(), rotations.size()); ++i) {
      const size_t key = std::min(i, keys.size() - 1);
      const size_t value = std::min(i, rotations.size() - 1);
      CRUMB_ASSIGN_OR_RETURN(
          const StoredRows stored,
          probe.Store(Parameters(keys[key], rotations[value], value_recipes_[value])));
      const HalvesError error = probe.Measure(stored, options_.windows);
      for (size_t half = 0; half < 2; ++half) {
        if (i < keys.size()) {
          choice->keys.half[half].push_back(Billionths(error.typical_half[half].keys));
        }
        if (i < rotations.size()) {
          choice->values.half[half].push_back(Billionths(error.half[half].values));
        }
      }
    }
    Choose(options_.key_choice_margin, &choice->keys);
    Choose(options_.value_choice_margin, &choice->values);
  }
  fitted->keys = std::move(keys[choice->keys.chosen]);
  fitted->value_rotation = std::move(rotations[choice->values.chosen]);
  fitted->value_clip = value_recipes_[choice->values.chosen].clip;
  fitted->values_by_deviation = value_recipes_[choice->values.chosen].by_deviation;
  return absl::OkStatus();
}

absl::Status LayerChooser::Run(std::span<FittedHead> heads, std::span<HeadChoice> choices) {
  CRUMB_RETURN_IF_ERROR(FitLayerMoments());
  for (uint32_t head = 0; head < heads.size(); ++head) {
    CRUMB_RETURN_IF_ERROR(AtHead(FitHead(head, &heads[head], &choices[head]), layer_, head));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ChosenHeads> ChooseHeads(const Statistics& statistics, const FitOptions& options) {
  const Geometry& geometry = statistics.geometry;
  ChosenHeads chosen;
  chosen.heads.resize(geometry.NumHeadBlocks());
  std::vector<HeadChoice> choices(geometry.NumHeadBlocks());
  std::vector<absl::Status> statuses(geometry.num_layers);
  std::atomic<uint32_t> next{0};
  const auto work = [&] {
    for (uint32_t layer = next++; layer < geometry.num_layers; layer = next++) {
      const size_t first = size_t{layer} * geometry.num_kv_heads;
      statuses[layer] = LayerChooser(statistics, options, layer)
                            .Run(std::span(chosen.heads).subspan(first, geometry.num_kv_heads),
                                 std::span(choices).subspan(first, geometry.num_kv_heads));
    }
  };
  const uint32_t wished =
      options.num_threads == 0 ? std::thread::hardware_concurrency() : options.num_threads;
  std::vector<std::thread> threads;
  for (uint32_t i = 1; i < std::min(wished, geometry.num_layers); ++i) {
    threads.emplace_back(work);
  }
  work();
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const absl::Status& status : statuses) {
    CRUMB_RETURN_IF_ERROR(status);
  }
  if (options.choose && !statistics.reservoir.empty()) {
    chosen.choices.key_margin = options.key_choice_margin;
    chosen.choices.value_margin = options.value_choice_margin;
    for (const NamedKeys& recipe : KeyRecipes(options, true)) {
      chosen.choices.key_recipes.push_back(recipe.name);
    }
    for (const NamedValues& recipe : ValueRecipes(options, true)) {
      chosen.choices.value_recipes.push_back(recipe.name);
    }
    chosen.choices.heads = std::move(choices);
  }
  return chosen;
}

}  // namespace crumb::calibrate
