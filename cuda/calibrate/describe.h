// SPDX-License-Identifier: Apache-2.0
//
// What inspect prints, a fact a line. Thread-safe.
#pragma once

#include <iosfwd>

#include "absl/status/status.h"

#include "crumb/cuda/profile.h"
#include "crumb/cuda/statistics.h"

namespace crumb::calibrate {

void Describe(const Profile& profile, std::ostream& out);

// Geometry, counts, and the spectra of queries, keys and values over all heads.
void Describe(const Statistics& statistics, std::ostream& out);

// How equal the channels are that these rotations make of these statistics, and their spectra.
// INVALID_ARGUMENT:
// statistics of another geometry; nothing is printed then.
absl::Status DescribeDiagonals(const Profile& profile,
                               const Statistics& statistics,
                               std::ostream& out);

// The largest |A B^T - I| over all layers, heads, and keys and values: see InverseError.
double LargestInverseError(const Profile& profile);

}  // namespace crumb::calibrate
