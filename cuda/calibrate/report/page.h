// SPDX-License-Identifier: Apache-2.0
//
// The report as one page of HTML, for people, and as JSON, for programs. Thread-safe.
#pragma once

#include <string>

#include "cuda/calibrate/report/figures.h"

namespace crumb::calibrate {

// Self-contained: no scripts, nothing loaded from elsewhere. Deterministic.
std::string ReportPage(const ReportFigures& figures);

// All that the page is made of: {"format": "crumb.report.v1", "model", "profile_id", "codec",
// "geometry", "windows", "statistics", "rows", "recipes": [{"name", "about", "mean", "heads":
// [L][H]}], "spectra": {"query_moment", "key_covariance", "value_covariance": [L][dim]}, "memory",
// "window_ablation", "choices" (as choices.h; null without), "verdict", "warnings"}. An error is
// {"output", "keys", "values", "scores"}.
std::string ReportJson(const ReportFigures& figures);

}  // namespace crumb::calibrate
