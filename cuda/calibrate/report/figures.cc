// SPDX-License-Identifier: Apache-2.0
//
// shared: profiles are made by Profile::Parse, which shares them.
#include "cuda/calibrate/report/figures.h"

#include <algorithm>
#include <memory>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"

#include "crumb/cuda/fit_profile.h"
#include "cuda/calibrate/report/gaussian.h"
#include "cuda/calibrate/reservoir_probe.h"
#include "cuda/calibrate/rotation.h"
#include "proto/base/status_macros.h"

namespace crumb::calibrate {
namespace {

constexpr uint64_t kLengths[] = {1024, 4096, 16'384, 65'536, 131'072};

struct Recipe {
  std::string name;
  std::string about;
  std::shared_ptr<const Profile> profile;
};

absl::StatusOr<std::shared_ptr<const Profile>> ProfileOf(const ProfileParts& parts) {
  CRUMB_ASSIGN_OR_RETURN(std::vector<std::byte> file, Profile::Serialize(parts));
  return Profile::Parse(std::move(file));
}

// Rounding to nearest in the model's own coordinates.
absl::StatusOr<std::shared_ptr<const Profile>> Unrotated(const Geometry& geometry,
                                                         float key_clip,
                                                         float value_clip) {
  const auto identities = [&](size_t dim) {
    std::vector<float> all(geometry.num_layers * dim * dim);
    for (size_t row = 0; row < geometry.num_layers * dim; ++row) {
      all[row * dim + row % dim] = 1;
    }
    return all;
  };
  ProfileParts parts;
  parts.geometry = geometry;
  parts.codec = CodecId::kOscarInt2;
  parts.key_rotation = identities(geometry.key_dim);
  parts.value_rotation = identities(geometry.value_dim);
  parts.key_clip.assign(geometry.NumHeadBlocks(), key_clip);
  parts.value_clip.assign(geometry.NumHeadBlocks(), value_clip);
  return ProfileOf(parts);
}

// What a profile could be, from the plainest to the one with the most steps. One that cannot be
// fitted to these statistics is left out, with a warning.
absl::StatusOr<std::vector<Recipe>> Recipes(const Statistics& statistics,
                                            std::vector<std::string>* warnings) {
  const Geometry& geometry = statistics.geometry;
  std::vector<Recipe> recipes;
  CRUMB_ASSIGN_OR_RETURN(auto naive, Unrotated(geometry, 0, 0));
  recipes.push_back({"naive", "rounded to nearest as the model made them", std::move(naive)});
  CRUMB_ASSIGN_OR_RETURN(auto clipped, Unrotated(geometry, 0.96F, 0.92F));
  recipes.push_back({"clip", "the same, outliers clipped", std::move(clipped)});
  if (!IsPowerOfTwo(geometry.key_dim) || !IsPowerOfTwo(geometry.value_dim)) {
    return recipes;  // No Hadamard matrix, so no recipe that is fitted here.
  }
  struct Fitted {
    const char* name = nullptr;
    const char* about = nullptr;
    FitOptions options;
  };
  const Fitted fits[] = {
      {"Hadamard",
       "rotated by a Hadamard matrix, clipped",
       {.codec = CodecId::kOscarInt2,
        .key_rotation = RotationKind::kHadamard,
        .value_rotation = RotationKind::kHadamard}},
      {"oscar-int2",
       "as published: one rotation a layer, clipped",
       {.codec = CodecId::kOscarInt2,
        .key_rotation = RotationKind::kPerLayer,
        .value_rotation = RotationKind::kPerLayer}},
      {"oscar-int2-lm",
       "a rotation a head, mean shift, levels by each row's mean and deviation",
       {.codec = CodecId::kOscarInt2Lm}},
      {"oscar-int2-aware",
       "a rotation a head, mean shift, attention-aware rounding",
       {.codec = CodecId::kOscarInt2Aware}},
      {"oscar-int2-tilted",
       "keys scaled too, and refitted for the queries that attend to them",
       {.codec = CodecId::kOscarInt2Tilted, .choose = false}},
  };
  for (const Fitted& fit : fits) {
    const auto fitted = FitProfile(statistics, fit.options);
    if (!fitted.ok()) {
      warnings->push_back(
          absl::StrCat(fit.name, " is left out: ", std::string(fitted.status().message())));
      continue;
    }
    CRUMB_ASSIGN_OR_RETURN(auto profile, ProfileOf(fitted->parts));
    recipes.push_back({fit.name, fit.about, std::move(profile)});
  }
  return recipes;
}

std::span<const double> Block(const std::vector<double>& all, size_t block, size_t size) {
  return std::span(all).subspan(block * size, size);
}

// Adds a head's spectrum to its layer's mean.
void AddSpectrum(const std::vector<double>& eigenvalues,
                 size_t layer,
                 double num_heads,
                 std::vector<std::vector<double>>* spectra) {
  spectra->resize(std::max(spectra->size(), layer + 1));
  (*spectra)[layer].resize(eigenvalues.size());
  for (size_t i = 0; i < eigenvalues.size(); ++i) {
    (*spectra)[layer][i] += eigenvalues[i] / num_heads;
  }
}

struct HeadGaussians {
  Gaussian queries;
  Gaussian keys;
  Gaussian values;
};

// The moments of one head, whose share of the spectra is added.
HeadGaussians DrawSpectra(const Statistics& statistics, size_t block, ReportFigures* figures) {
  const size_t dk = statistics.geometry.key_dim;
  const size_t dv = statistics.geometry.value_dim;
  const size_t layer = block / statistics.geometry.num_kv_heads;
  const auto heads = static_cast<double>(statistics.geometry.num_kv_heads);
  HeadGaussians head{
      .queries = Gaussian(Block(statistics.query_moment, block, dk * dk),
                          Block(statistics.query_mean, block, dk), dk),
      .keys = Gaussian(Block(statistics.key_moment, block, dk * dk),
                       Block(statistics.key_mean, block, dk), dk),
      .values = Gaussian(Block(statistics.value_covariance, block, dv * dv), {}, dv)};
  const Gaussian metric(Block(statistics.query_moment, block, dk * dk), {}, dk);
  AddSpectrum(metric.eigenvalues(), layer, heads, &figures->query_spectra);
  AddSpectrum(head.keys.eigenvalues(), layer, heads, &figures->key_spectra);
  AddSpectrum(head.values.eigenvalues(), layer, heads, &figures->value_spectra);
  return head;
}

AttentionSample DrawHead(const Statistics& statistics,
                         size_t block,
                         const ReportOptions& options,
                         ReportFigures* figures) {
  const HeadGaussians head = DrawSpectra(statistics, block, figures);
  const size_t num_keys = size_t{options.num_pages} * kPageTokens;
  return {.key_dim = statistics.geometry.key_dim,
          .value_dim = statistics.geometry.value_dim,
          .queries = head.queries.Draw(options.num_queries, 3 * block),
          .keys = head.keys.Draw(num_keys, 3 * block + 1),
          .values = head.values.Draw(num_keys, 3 * block + 2)};
}

void AddToMean(const AttentionError& error, double share, AttentionError* mean) {
  mean->output += error.output * share;
  mean->keys += error.keys * share;
  mean->values += error.values * share;
  mean->scores += error.scores * share;
}

std::vector<MemoryFigures> Memory(const Geometry& geometry, const Windows& windows) {
  const double bf16 = static_cast<double>(geometry.PageBytes(PageEncoding::kBf16)) / kPageTokens;
  const double int2 = static_cast<double>(geometry.PageBytes(PageEncoding::kInt2)) / kPageTokens;
  std::vector<MemoryFigures> memory;
  for (const uint64_t length : kLengths) {
    const uint64_t exact =
        std::min<uint64_t>(length, uint64_t{windows.sink_tokens} + windows.recent_tokens);
    memory.push_back({.num_tokens = length,
                      .bf16_bytes = static_cast<double>(length) * bf16,
                      .crumb_bytes = static_cast<double>(exact) * bf16 +
                                     static_cast<double>(length - exact) * int2});
  }
  return memory;
}

// The windows that are tried beside the profile's, without their errors.
std::vector<WindowFigures> OtherWindows(const Geometry& geometry) {
  const double bf16 = static_cast<double>(geometry.PageBytes(PageEncoding::kBf16)) / kPageTokens;
  const double int2 = static_cast<double>(geometry.PageBytes(PageEncoding::kInt2)) / kPageTokens;
  std::vector<WindowFigures> windows;
  for (const uint32_t sink : {64U, 128U, 256U}) {
    for (const uint32_t recent : {64U, 128U, 256U, 512U, 1024U}) {
      const double exact = sink + recent;
      windows.push_back(
          {.windows = {.sink_tokens = sink, .recent_tokens = recent},
           .error = 0,
           .crumb_bytes = exact * bf16 + (static_cast<double>(kWindowTokens) - exact) * int2});
    }
  }
  return windows;
}

// The errors of one head under each recipe, and what other windows would make of the last, which is
// the profile's own.
absl::StatusOr<std::vector<AttentionError>> MeasureRows(const Statistics& statistics,
                                                        size_t block,
                                                        const std::vector<Recipe>& recipes,
                                                        ReportFigures* figures) {
  DrawSpectra(statistics, block, figures);
  const ReservoirProbe probe(statistics, block);
  const auto layer = static_cast<uint32_t>(block / statistics.geometry.num_kv_heads);
  const auto kv_head = static_cast<uint32_t>(block % statistics.geometry.num_kv_heads);
  const double share = 1 / static_cast<double>(statistics.geometry.NumHeadBlocks());
  std::vector<AttentionError> errors;
  StoredRows stored;
  for (const Recipe& recipe : recipes) {
    CRUMB_ASSIGN_OR_RETURN(stored, probe.Store(recipe.profile->head(layer, kv_head)));
    errors.push_back(probe.Measure(stored, figures->windows).typical);
  }
  for (WindowFigures& other : figures->window_ablation) {
    other.error += share * probe.Measure(stored, other.windows).bounded_output;
  }
  return errors;
}

absl::StatusOr<std::vector<AttentionError>> MeasureDrawn(AttentionSample sample,
                                                         size_t block,
                                                         const std::vector<Recipe>& recipes) {
  const AttentionProbe probe(std::move(sample));
  std::vector<AttentionError> errors;
  for (const Recipe& recipe : recipes) {
    const uint32_t heads = recipe.profile->geometry().num_kv_heads;
    CRUMB_ASSIGN_OR_RETURN(const AttentionError error, probe.Measure(recipe.profile->head(
                                                           static_cast<uint32_t>(block / heads),
                                                           static_cast<uint32_t>(block % heads))));
    errors.push_back(error);
  }
  return errors;
}

absl::Status CheckInputs(const Statistics& statistics,
                         const Profile& profile,
                         const ReportOptions& options) {
  const Geometry& a = statistics.geometry;
  const Geometry& b = profile.geometry();
  if (a != b) {
    const auto text = [](const Geometry& geometry) {
      return absl::StrCat(geometry.num_layers, " layers, ", geometry.num_kv_heads,
                          " KV heads, key_dim ", geometry.key_dim, ", value_dim ",
                          geometry.value_dim);
    };
    return absl::InvalidArgumentError(absl::StrCat("report: the statistics are of ", text(a),
                                                   "; the profile is of ", text(b),
                                                   ". Both must be of one model"));
  }
  if (options.num_pages < 1 || options.num_pages > 1024 || options.num_queries < 1 ||
      options.num_queries > 65'536) {
    return absl::InvalidArgumentError(
        absl::StrCat("report: ", options.num_pages, " pages and ", options.num_queries,
                     " queries a head; 1 to 1024 and 1 to 65536 can be drawn"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Recipe>> AllRecipes(const Statistics& statistics,
                                               const Profile& profile,
                                               std::vector<std::string>* warnings) {
  CRUMB_ASSIGN_OR_RETURN(std::vector<Recipe> recipes, Recipes(statistics, warnings));
  const auto file = profile.file();
  CRUMB_ASSIGN_OR_RETURN(auto copy, Profile::Parse({file.begin(), file.end()}));
  recipes.push_back({"this profile", std::string(CodecName(profile.codec())), std::move(copy)});
  return recipes;
}

}  // namespace

absl::StatusOr<ReportFigures> ComputeFigures(const Statistics& statistics,
                                             const Profile& profile,
                                             const ReportOptions& options) {
  CRUMB_RETURN_IF_ERROR(CheckInputs(statistics, profile, options));
  const Geometry& geometry = statistics.geometry;
  ReportFigures figures;
  figures.model = profile.model();
  figures.profile_id = profile.id().Hex();
  figures.codec = CodecName(profile.codec());
  figures.geometry = geometry;
  figures.windows = profile.windows();
  figures.num_query_heads = statistics.num_query_heads;
  figures.num_texts = statistics.num_texts;
  figures.num_tokens = statistics.num_tokens;
  const Reservoir& rows = statistics.reservoir;
  figures.is_from_rows = !rows.empty();
  figures.num_keys =
      rows.empty() ? size_t{options.num_pages} * kPageTokens : rows.key_tokens.size();
  figures.num_queries = rows.empty() ? options.num_queries : rows.query_tokens.size();
  if (auto choices = ParseChoices(profile.choices()); choices.ok()) {
    figures.choices = *std::move(choices);
  } else {
    figures.warnings.push_back(std::string(choices.status().message()));
  }
  figures.memory = Memory(geometry, profile.windows());
  if (statistics.model != profile.model()) {
    figures.warnings.push_back(absl::StrCat("the statistics are of '", statistics.model,
                                            "', the profile of '", profile.model(),
                                            "': the same model by another name?"));
  }
  CRUMB_ASSIGN_OR_RETURN(const std::vector<Recipe> recipes,
                         AllRecipes(statistics, profile, &figures.warnings));
  for (const Recipe& recipe : recipes) {
    figures.recipes.push_back(
        {.name = recipe.name, .about = recipe.about, .heads = {}, .mean = {}});
  }
  if (figures.is_from_rows) {
    figures.window_ablation = OtherWindows(geometry);
  }
  const double share = 1 / static_cast<double>(geometry.NumHeadBlocks());
  for (size_t block = 0; block < geometry.NumHeadBlocks(); ++block) {
    CRUMB_ASSIGN_OR_RETURN(
        const std::vector<AttentionError> errors,
        figures.is_from_rows
            ? MeasureRows(statistics, block, recipes, &figures)
            : MeasureDrawn(DrawHead(statistics, block, options, &figures), block, recipes));
    for (size_t i = 0; i < recipes.size(); ++i) {
      const AttentionError& error = errors[i];
      figures.recipes[i].heads.push_back(error);
      AddToMean(error, share, &figures.recipes[i].mean);
    }
  }
  return figures;
}

}  // namespace crumb::calibrate
