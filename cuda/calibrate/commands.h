// SPDX-License-Identifier: Apache-2.0
//
// What crumb-calibrate does, apart from its command line. Each prints for people to `out`; what
// they should worry about goes to `err`.
#pragma once

#include <filesystem>
#include <iosfwd>

#include "absl/status/status.h"

#include "crumb/cuda/fit_profile.h"
#include "cuda/calibrate/import_profile.h"
#include "cuda/calibrate/report/figures.h"

namespace crumb::calibrate {

struct Streams {
  std::ostream& out;
  std::ostream& err;
};

// Fits a profile to the statistics and writes it, whole or not at all. Errors as Statistics::Load,
// FitProfile, Profile::Serialize and WriteFileAtomically.
absl::Status Fit(const std::filesystem::path& statistics,
                 const FitOptions& options,
                 const std::filesystem::path& profile,
                 Streams streams);

// Makes a profile of two published rotation checkpoints and, unless the path is empty, statistics.
// Errors as LoadRotationCheckpoint, ImportProfile, and those of Fit.
struct ImportFiles {
  std::filesystem::path keys;
  std::filesystem::path values;
  std::filesystem::path statistics;
};
absl::Status Import(const ImportFiles& files,
                    const ImportOptions& options,
                    const std::filesystem::path& profile,
                    Streams streams);

// Writes what the profile is expected to cost as a page and, unless the path is empty, as JSON; the
// verdict also goes to `out`. Errors as ComputeFigures and those of the readers.
struct ReportFiles {
  std::filesystem::path statistics;
  std::filesystem::path profile;
  std::filesystem::path page;
  std::filesystem::path json;
};
absl::Status Report(const ReportFiles& files, const ReportOptions& options, Streams streams);

// Describes a profile or a statistics file, whichever it is, after all checks of its reader. With
// `statistics`, which may be empty, also how equal the channels are that a profile's rotations
// make.
absl::Status Inspect(const std::filesystem::path& path,
                     const std::filesystem::path& statistics,
                     Streams streams);

// Reads a profile with all checks; with `expected_id` (hexadecimal, a prefix will do)
// FAILED_PRECONDITION when it has another one. So too when a rotation and what undoes it are
// further from the identity than 1e-6, a thousandth of what readers accept.
absl::Status Verify(const std::filesystem::path& path,
                    const std::string& expected_id,
                    Streams streams);

}  // namespace crumb::calibrate
