// SPDX-License-Identifier: Apache-2.0
#include "cuda/calibrate/describe.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <ostream>
#include <span>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "cuda/calibrate/checks.h"
#include "cuda/calibrate/choices.h"

namespace crumb::calibrate {
namespace {

std::string Describe(const Geometry& geometry) {
  return absl::StrCat(geometry.num_layers, " layers, ", geometry.num_kv_heads,
                      " KV heads, key_dim ", geometry.key_dim, ", value_dim ", geometry.value_dim);
}

using HeadTest = bool (*)(const HeadParameters&);

bool IsAny(const HeadParameters& /*head*/) {
  return true;
}
bool HasValueRange(const HeadParameters& head) {
  return !head.values_by_deviation;
}

// Of the heads that pass the test: "0.92", or "0.9 to 0.95" where they differ; "off".
std::string ClipText(const Profile& profile, HeadTest test, float HeadParameters::*member) {
  std::optional<float> low;
  float high = 0;
  for (uint32_t layer = 0; layer < profile.geometry().num_layers; ++layer) {
    for (uint32_t head = 0; head < profile.geometry().num_kv_heads; ++head) {
      if (test(profile.head(layer, head))) {
        const float ratio = std::max(profile.head(layer, head).*member, 0.0F);
        low = std::min(low.value_or(ratio), ratio);
        high = std::max(high, ratio);
      }
    }
  }
  if (high == 0) {
    return "off";
  }
  return *low == high ? absl::StrCat(high) : absl::StrCat(*low, " to ", high);
}

constexpr char kByDeviation[] = "by each row's mean and deviation";

// How many heads pass the test.
size_t CountHeads(const Profile& profile, HeadTest test) {
  const Geometry& geometry = profile.geometry();
  size_t count = 0;
  for (uint32_t layer = 0; layer < geometry.num_layers; ++layer) {
    for (uint32_t head = 0; head < geometry.num_kv_heads; ++head) {
      count += test(profile.head(layer, head)) ? size_t{1} : size_t{0};
    }
  }
  return count;
}

std::string KeyLevelsText(const Profile& profile) {
  if (profile.codec() == CodecId::kOscarInt2Lm) {
    return kByDeviation;
  }
  if (!HasFeedback(profile.codec())) {
    return absl::StrCat("range, clip ", ClipText(profile, IsAny, &HeadParameters::key_clip));
  }
  const size_t others =
      CountHeads(profile, [](const HeadParameters& head) { return head.key_ranges != kKeyRanges; });
  return others == 0 ? "range searched for each row"
                     : absl::StrCat(
                           "range searched for each row, among other ones than the "
                           "codec's in ",
                           others, " of ", profile.geometry().NumHeadBlocks(), " heads");
}

std::string ValueLevelsText(const Profile& profile) {
  const size_t heads = profile.geometry().NumHeadBlocks();
  const size_t ranges = CountHeads(profile, HasValueRange);
  if (ranges == 0) {
    return kByDeviation;
  }
  const std::string text =
      absl::StrCat("range, clip ", ClipText(profile, HasValueRange, &HeadParameters::value_clip));
  return ranges == heads ? text
                         : absl::StrCat(text, "; ", kByDeviation, " in ", heads - ranges, " of ",
                                        heads, " heads");
}

// What a query is rotated by, so that it meets its keys.
const float* QueryRotation(const HeadParameters& head) {
  return head.query_rotation != nullptr ? head.query_rotation : head.key_rotation;
}
const float* ValueRotation(const HeadParameters& head) {
  return head.value_rotation;
}
const float* KeyRotation(const HeadParameters& head) {
  return head.key_rotation;
}
using Member = const float* (*)(const HeadParameters&);

struct RotationSummary {
  double error = 0;        // The largest |A B^T - I|.
  bool is_shared = false;  // By the heads of each layer.
};

RotationSummary Summarise(const Profile& profile, Member a, Member b, size_t dim) {
  RotationSummary summary;
  const Geometry& geometry = profile.geometry();
  for (uint32_t layer = 0; layer < geometry.num_layers; ++layer) {
    for (uint32_t head = 0; head < geometry.num_kv_heads; ++head) {
      const float* rotation = a(profile.head(layer, head));
      if (head > 0 && rotation == a(profile.head(layer, head - 1))) {
        summary.is_shared = true;
        continue;
      }
      summary.error = std::max(
          summary.error,
          InverseError({rotation, dim * dim}, {b(profile.head(layer, head)), dim * dim}, dim));
    }
  }
  return summary;
}

// The largest over the heads of the mean key's length.
double LargestMean(const Profile& profile) {
  const Geometry& geometry = profile.geometry();
  double largest = 0;
  for (uint32_t layer = 0; layer < geometry.num_layers; ++layer) {
    for (uint32_t head = 0; head < geometry.num_kv_heads; ++head) {
      double squares = 0;
      for (const float x : std::span(profile.head(layer, head).key_mean, geometry.key_dim)) {
        squares += double{x} * double{x};
      }
      largest = std::max(largest, std::sqrt(squares));
    }
  }
  return largest;
}

void Row(std::ostream& out, const char* name, const std::string& value) {
  out << absl::StreamFormat("%-16s %s\n", name, value);
}

// "31 % (12 % to 64 %)": the median, the least and the most.
std::string Spread(std::vector<double> values, const char* unit) {
  std::ranges::sort(values);
  return absl::StrFormat("%.3g%s (%.3g to %.3g)", values[values.size() / 2], unit, values.front(),
                         values.back());
}

void SpectrumRow(std::ostream& out,
                 const char* name,
                 const std::vector<double>& moments,
                 size_t dim) {
  std::vector<double> largest;
  std::vector<double> counts;
  for (size_t block = 0; block < moments.size() / (dim * dim); ++block) {
    const Spectrum spectrum =
        SpectrumOf(std::span(moments).subspan(block * dim * dim, dim * dim), dim);
    largest.push_back(100 * spectrum.largest);
    counts.push_back(static_cast<double>(spectrum.num_for_90));
  }
  Row(out, name,
      absl::StrCat("largest direction ", Spread(largest, " %"), ", 90 % in ", Spread(counts, ""),
                   " of ", dim));
}

void SpectraRows(const Statistics& statistics, std::ostream& out) {
  out << "spectra, the median head (the least to the most):\n";
  SpectrumRow(out, "  queries", statistics.query_moment, statistics.geometry.key_dim);
  SpectrumRow(out, "  keys", statistics.key_moment, statistics.geometry.key_dim);
  SpectrumRow(out, "  values", statistics.value_covariance, statistics.geometry.value_dim);
}

// Over all heads: how far a channel is from the mean, at worst.
void DiagonalRow(std::ostream& out,
                 const char* name,
                 const Profile& profile,
                 const std::vector<double>& moments,
                 Member rotation,
                 size_t dim) {
  std::vector<double> spreads;
  for (size_t block = 0; block < profile.geometry().NumHeadBlocks(); ++block) {
    const HeadParameters& head =
        profile.head(static_cast<uint32_t>(block / profile.geometry().num_kv_heads),
                     static_cast<uint32_t>(block % profile.geometry().num_kv_heads));
    spreads.push_back(DiagonalSpread(std::span(moments).subspan(block * dim * dim, dim * dim),
                                     {rotation(head), dim * dim}, dim));
  }
  std::ranges::sort(spreads);
  Row(out, name,
      absl::StrFormat("equal to %.2g of their mean (median head), %.2g at worst",
                      spreads[spreads.size() / 2], spreads.back()));
}

// "default 64, Hadamard alone 11".
std::string Counts(const std::vector<std::string>& recipes,
                   const std::vector<HeadChoice>& heads,
                   RecipeErrors HeadChoice::*member) {
  std::string text;
  for (size_t recipe = 0; recipe < recipes.size(); ++recipe) {
    const auto count = std::ranges::count_if(
        heads, [&](const HeadChoice& head) { return (head.*member).chosen == recipe; });
    if (count > 0) {
      absl::StrAppend(&text, text.empty() ? "" : ", ", recipes[recipe], " ", count);
    }
  }
  return text;
}

void DescribeChoices(const Profile& profile, std::ostream& out) {
  const auto choices = ParseChoices(profile.choices());
  if (!choices.ok()) {
    Row(out, "recipes", std::string(choices.status().message()));
  } else if (!choices->heads.empty()) {
    Row(out, "key recipes", Counts(choices->key_recipes, choices->heads, &HeadChoice::keys));
    Row(out, "value recipes", Counts(choices->value_recipes, choices->heads, &HeadChoice::values));
  }
}

}  // namespace

void Describe(const Profile& profile, std::ostream& out) {
  const Geometry& geometry = profile.geometry();
  const size_t int2_bytes = geometry.PageBytes(PageEncoding::kInt2);
  const size_t bf16_bytes = geometry.PageBytes(PageEncoding::kBf16);
  const double elements = static_cast<double>(bf16_bytes) / 2;
  Row(out, "model profile", profile.id().Hex());
  Row(out, "model", profile.model());
  Row(out, "geometry", Describe(geometry));
  Row(out, "codec", std::string(CodecName(profile.codec())));
  Row(out, "windows",
      absl::StrCat("sink ", profile.windows().sink_tokens, ", recent ",
                   profile.windows().recent_tokens, " tokens in BF16"));
  const RotationSummary keys = Summarise(profile, KeyRotation, QueryRotation, geometry.key_dim);
  const char* each = keys.is_shared ? "layer" : "KV head";
  Row(out, "key rotation",
      profile.codec() == CodecId::kOscarInt2Tilted
          ? absl::StrFormat("one a %s, scaled by the keys' scatter; inverse to queries' to %.1e",
                            each, keys.error)
          : absl::StrFormat("one a %s, orthogonal to %.1e", each, keys.error));
  const RotationSummary values =
      Summarise(profile, ValueRotation, ValueRotation, geometry.value_dim);
  Row(out, "value rotation",
      absl::StrFormat("one a %s, orthogonal to %.1e", values.is_shared ? "layer" : "KV head",
                      values.error));
  const double mean = LargestMean(profile);
  Row(out, "key mean", mean == 0 ? "none" : absl::StrFormat("at most %.3g long", mean));
  Row(out, "key levels", KeyLevelsText(profile));
  Row(out, "value levels", ValueLevelsText(profile));
  DescribeChoices(profile, out);
  Row(out, "page",
      absl::StrFormat("%d tokens: %d bytes at two bits (%.2f bits an element), %d in BF16",
                      kPageTokens, int2_bytes, static_cast<double>(int2_bytes) * 8 / elements,
                      bf16_bytes));
  Row(out, "file", absl::StrCat(profile.file().size(), " bytes"));
}

void Describe(const Statistics& statistics, std::ostream& out) {
  Row(out, "statistics of", statistics.model);
  Row(out, "geometry", Describe(statistics.geometry));
  Row(out, "query heads", absl::StrCat(statistics.num_query_heads));
  Row(out, "texts", absl::StrCat(statistics.num_texts));
  Row(out, "tokens", absl::StrCat(statistics.num_tokens));
  const Reservoir& rows = statistics.reservoir;
  Row(out, "rows kept",
      rows.empty() ? "none"
                   : absl::StrCat(rows.key_tokens.size(), " keys with values, ",
                                  rows.query_tokens.size(), " queries a KV head"));
  SpectraRows(statistics, out);
}

absl::Status DescribeDiagonals(const Profile& profile,
                               const Statistics& statistics,
                               std::ostream& out) {
  const Geometry& geometry = profile.geometry();
  if (statistics.geometry != geometry) {
    return absl::InvalidArgumentError(
        absl::StrCat("the statistics are of ", Describe(statistics.geometry),
                     "; the profile is of ", Describe(geometry), ". Both must be of one model"));
  }
  DiagonalRow(out, "key channels", profile, statistics.query_moment, QueryRotation,
              geometry.key_dim);
  DiagonalRow(out, "value channels", profile, statistics.value_covariance, ValueRotation,
              geometry.value_dim);
  SpectraRows(statistics, out);
  return absl::OkStatus();
}

double LargestInverseError(const Profile& profile) {
  const Geometry& geometry = profile.geometry();
  return std::max(Summarise(profile, KeyRotation, QueryRotation, geometry.key_dim).error,
                  Summarise(profile, ValueRotation, ValueRotation, geometry.value_dim).error);
}

}  // namespace crumb::calibrate
