// SPDX-License-Identifier: Apache-2.0
//
// The numbers of a report: what a profile is expected to cost, head by head, beside the recipes
// that it could have been. From statistics alone; no model is run.
//
// Errors are measured on the rows of the statistics' reservoir (see reservoir_probe.h), sink and
// recent window exact; a head's number is the geometric mean over its queries. Statistics without
// rows have them drawn from Gaussians of each head's mean and second moment (values: of the
// weighted covariance, mean zero): drawn queries and keys know nothing of each other or of their
// positions, where those of a text do, and drawn values have no common part, so errors are larger
// than on text. Either way, compare recipes and heads by these numbers, and measure perplexity
// before you trust one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "crumb/cuda/profile.h"
#include "crumb/cuda/statistics.h"
#include "cuda/calibrate/attention_error.h"
#include "cuda/calibrate/choices.h"

namespace crumb::calibrate {

struct RecipeFigures {
  std::string name;                   // "oscar-int2-aware"; "this profile" is the last.
  std::string about;                  // A clause for people.
  std::vector<AttentionError> heads;  // [L, H]
  AttentionError mean;                // Over all heads alike.
};

struct MemoryFigures {
  uint64_t num_tokens = 0;  // Of one sequence.
  double bf16_bytes = 0;    // Of its whole KV cache.
  double crumb_bytes = 0;   // Sink and recent window in BF16, all else at two bits.
};

// What this profile loses with other windows; all other things equal.
struct WindowFigures {
  Windows windows;
  double error = 0;        // Of attention's output, mean over all heads; from rows alone.
  double crumb_bytes = 0;  // Of a sequence of kWindowTokens.
};
inline constexpr uint64_t kWindowTokens = 32'768;

struct ReportFigures {
  std::string model;
  std::string profile_id;
  std::string codec;
  Geometry geometry;
  Windows windows;
  uint32_t num_query_heads = 0;
  uint64_t num_texts = 0;
  uint64_t num_tokens = 0;
  bool is_from_rows = false;  // Else rows were drawn.
  size_t num_keys = 0;        // A head.
  size_t num_queries = 0;
  std::vector<RecipeFigures> recipes;
  // [L, dim]: eigenvalues, descending, mean over the heads.
  std::vector<std::vector<double>> query_spectra;  // E[q q^T]: what an error of a key costs.
  std::vector<std::vector<double>> key_spectra;    // The keys' covariance.
  std::vector<std::vector<double>> value_spectra;  // The weighted covariance of values.
  std::vector<MemoryFigures> memory;
  std::vector<WindowFigures> window_ablation;  // Empty unless from rows; sinks by turns, ascending.
  Choices choices;                             // Of the profile; no heads: it does not say.
  std::vector<std::string> warnings;
};

struct ReportOptions {
  uint32_t num_pages = 4;  // Of drawn keys a head; more make the numbers steadier, and slower.
  size_t num_queries = 64;
};

// INVALID_ARGUMENT: a profile of another geometry than the statistics'; no pages or no queries.
// Time O(L H d^3): from rows 3 s of one core for 30 layers of 3 heads at head_dim 64, drawn 10 s
// for 36 layers of 8 heads at 128 (AMD EPYC).
absl::StatusOr<ReportFigures> ComputeFigures(const Statistics& statistics,
                                             const Profile& profile,
                                             const ReportOptions& options);

// The position in `recipes` of this profile's figures, always there.
inline const RecipeFigures& ThisProfile(const ReportFigures& figures) {
  return figures.recipes.back();
}

}  // namespace crumb::calibrate
