// SPDX-License-Identifier: Apache-2.0
//
// What the figures say, in words. Thread-safe.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "cuda/calibrate/report/figures.h"

namespace crumb::calibrate {

struct WorstHead {
  uint32_t layer = 0;
  uint32_t kv_head = 0;
  double output_error = 0;
};
// This profile's heads by output error, the worst first.
std::vector<WorstHead> HeadsByError(const ReportFigures& figures);

// Sentences, the most important first: what this profile loses beside the others, whether the order
// naive > clip > Hadamard > oscar-int2 > aware > tilted came out, where the loss sits, in K or in
// V, which windows it should have, what it saves, and what to do next.
std::vector<std::string> Verdict(const ReportFigures& figures);

// The least windows of the ablation from which on doubling the recent one, or the sink, would spare
// less than a third of the error, but not below the default ones, with which perplexity was
// measured; nullptr without an ablation.
const WindowFigures* RecommendedWindows(const ReportFigures& figures);

std::string Percent(double share);    // "3.4 %", with two digits that say something.
std::string BytesText(double bytes);  // "4.5 KiB".

}  // namespace crumb::calibrate
