// SPDX-License-Identifier: Apache-2.0
#include "cuda/calibrate/commands.h"

#include <optional>
#include <ostream>
#include <span>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "crumb/cuda/statistics.h"
#include "cuda/calibrate/describe.h"
#include "cuda/calibrate/report/page.h"
#include "cuda/calibrate/report/verdict.h"
#include "cuda/profile/safetensors.h"
#include "proto/base/file.h"
#include "proto/base/status_macros.h"

namespace crumb::calibrate {
namespace {

// Of |R R^T - I|, each element. Readers accept more, which costs quality and nothing else.
constexpr double kVerifiedInverseError = 1e-6;

// Writes the profile, whole or not at all, and describes it.
absl::Status Write(const ProfileParts& parts,
                   const std::vector<std::string>& warnings,
                   const std::filesystem::path& profile_path,
                   Streams streams) {
  CRUMB_ASSIGN_OR_RETURN(const std::vector<std::byte> file, Profile::Serialize(parts));
  CRUMB_RETURN_IF_ERROR(WriteFileAtomically(profile_path, file));
  CRUMB_ASSIGN_OR_RETURN(const auto profile, Profile::Parse(file));
  for (const std::string& warning : warnings) {
    streams.err << "warning: " << warning << "\n";
  }
  streams.out << "wrote " << profile_path.string() << "\n\n";
  Describe(*profile, streams.out);
  return absl::OkStatus();
}

}  // namespace

absl::Status Fit(const std::filesystem::path& statistics_path,
                 const FitOptions& options,
                 const std::filesystem::path& profile_path,
                 Streams streams) {
  CRUMB_ASSIGN_OR_RETURN(const Statistics statistics, Statistics::Load(statistics_path));
  CRUMB_ASSIGN_OR_RETURN(const FittedProfile fitted, FitProfile(statistics, options));
  return Write(fitted.parts, fitted.warnings, profile_path, streams);
}

absl::Status Import(const ImportFiles& files,
                    const ImportOptions& options,
                    const std::filesystem::path& profile_path,
                    Streams streams) {
  CRUMB_ASSIGN_OR_RETURN(const auto keys, checkpoint::LoadRotationCheckpoint(files.keys));
  CRUMB_ASSIGN_OR_RETURN(const auto values, checkpoint::LoadRotationCheckpoint(files.values));
  std::optional<Statistics> statistics;
  if (!files.statistics.empty()) {
    CRUMB_ASSIGN_OR_RETURN(statistics, Statistics::Load(files.statistics));
  }
  CRUMB_ASSIGN_OR_RETURN(const ImportedProfile imported,
                         ImportProfile(keys, values, statistics, options));
  return Write(imported.parts, imported.warnings, profile_path, streams);
}

absl::Status Report(const ReportFiles& files, const ReportOptions& options, Streams streams) {
  CRUMB_ASSIGN_OR_RETURN(const Statistics statistics, Statistics::Load(files.statistics));
  CRUMB_ASSIGN_OR_RETURN(const auto profile, Profile::Load(files.profile));
  CRUMB_ASSIGN_OR_RETURN(const ReportFigures figures,
                         ComputeFigures(statistics, *profile, options));
  const std::string page = ReportPage(figures);
  CRUMB_RETURN_IF_ERROR(WriteFileAtomically(files.page, std::as_bytes(std::span(page))));
  if (!files.json.empty()) {
    const std::string json = ReportJson(figures);
    CRUMB_RETURN_IF_ERROR(WriteFileAtomically(files.json, std::as_bytes(std::span(json))));
  }
  for (const std::string& warning : figures.warnings) {
    streams.err << "warning: " << warning << "\n";
  }
  for (const std::string& sentence : Verdict(figures)) {
    streams.out << sentence << "\n";
  }
  streams.out << "\nwrote " << files.page.string() << "\n";
  return absl::OkStatus();
}

absl::Status Inspect(const std::filesystem::path& path,
                     const std::filesystem::path& statistics_path,
                     Streams streams) {
  CRUMB_ASSIGN_OR_RETURN(const std::vector<std::byte> file, ReadFile(path, Profile::kMaxFileBytes));
  const auto contents = ParseSafetensors(file);
  if (contents.ok() && contents->metadata.contains("format") &&
      absl::StartsWith(contents->metadata.at("format"), "crumb.statistics.")) {
    CRUMB_ASSIGN_OR_RETURN(const Statistics statistics, Statistics::Load(path));
    Describe(statistics, streams.out);
    return absl::OkStatus();
  }
  CRUMB_ASSIGN_OR_RETURN(const auto profile, Profile::Load(path));
  Describe(*profile, streams.out);
  if (statistics_path.empty()) {
    return absl::OkStatus();
  }
  CRUMB_ASSIGN_OR_RETURN(const Statistics statistics, Statistics::Load(statistics_path));
  return DescribeDiagonals(*profile, statistics, streams.out);
}

absl::Status Verify(const std::filesystem::path& path,
                    const std::string& expected_id,
                    Streams streams) {
  CRUMB_ASSIGN_OR_RETURN(const auto profile, Profile::Load(path));
  const std::string id = profile->id().Hex();
  if (!absl::StartsWith(id, expected_id)) {
    return absl::FailedPreconditionError(
        absl::StrCat(path.string(), " is profile ", id, ", expected ", expected_id,
                     "; engines of one namespace need the same file"));
  }
  const double error = LargestInverseError(*profile);
  if (!(error < kVerifiedInverseError)) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "%s: a rotation is inverse to what reads it to %.1e alone, and one that was fitted in "
        "double "
        "and stored in float is to less than %.0e: it may be served, but fit or import it anew",
        path.string(), error, kVerifiedInverseError));
  }
  streams.out << path.string() << ": OK, profile " << id << "\n"
              << absl::StreamFormat("rotations are inverse to what reads them to %.1e\n", error);
  return absl::OkStatus();
}

}  // namespace crumb::calibrate
