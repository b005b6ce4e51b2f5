// SPDX-License-Identifier: Apache-2.0
#include "cuda/calibrate/commands.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <ostream>
#include <span>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "crumb/cuda/statistics.h"
#include "cuda/calibrate/report/page.h"
#include "cuda/calibrate/report/verdict.h"
#include "cuda/calibrate/rotation.h"
#include "cuda/profile/safetensors.h"
#include "proto/base/file.h"
#include "proto/base/status_macros.h"

namespace crumb::calibrate {
namespace {

std::string Describe(const Geometry& geometry) {
  return absl::StrCat(geometry.num_layers, " layers, ", geometry.num_kv_heads,
                      " KV heads, key_dim ", geometry.key_dim, ", value_dim ", geometry.value_dim);
}

// "0.92", or "0.9 to 0.95" where heads differ.
std::string ClipText(const Profile& profile, float HeadParameters::*member) {
  float low = profile.head(0, 0).*member;
  float high = low;
  for (uint32_t layer = 0; layer < profile.geometry().num_layers; ++layer) {
    for (uint32_t head = 0; head < profile.geometry().num_kv_heads; ++head) {
      low = std::min(low, profile.head(layer, head).*member);
      high = std::max(high, profile.head(layer, head).*member);
    }
  }
  if (high <= 0) {
    return "off";
  }
  return low == high ? absl::StrCat(low) : absl::StrCat(low, " to ", high);
}

struct RotationSummary {
  double error = 0;        // The largest |R R^T - I|.
  bool is_shared = false;  // By the heads of each layer.
};

RotationSummary Summarise(const Profile& profile,
                          const float* HeadParameters::*member,
                          size_t dim) {
  RotationSummary summary;
  const Geometry& geometry = profile.geometry();
  for (uint32_t layer = 0; layer < geometry.num_layers; ++layer) {
    for (uint32_t head = 0; head < geometry.num_kv_heads; ++head) {
      const float* rotation = profile.head(layer, head).*member;
      if (head > 0 && rotation == profile.head(layer, head - 1).*member) {
        summary.is_shared = true;
        continue;
      }
      summary.error = std::max(summary.error, OrthogonalityError({rotation, dim * dim}, dim));
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

void RotationRow(std::ostream& out, const char* name, const RotationSummary& summary) {
  Row(out, name,
      absl::StrFormat("one a %s, orthogonal to %.1e", summary.is_shared ? "layer" : "KV head",
                      summary.error));
}

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
  if (profile.codec() == CodecId::kOscarInt2Tilted) {
    Row(out, "key rotation", "one a KV head, scaled by the keys' scatter; queries by its inverse");
  } else {
    RotationRow(out, "key rotation",
                Summarise(profile, &HeadParameters::key_rotation, geometry.key_dim));
  }
  RotationRow(out, "value rotation",
              Summarise(profile, &HeadParameters::value_rotation, geometry.value_dim));
  const double mean = LargestMean(profile);
  Row(out, "key mean", mean == 0 ? "none" : absl::StrFormat("at most %.3g long", mean));
  Row(out, "key clip",
      profile.codec() == CodecId::kOscarInt2 ? ClipText(profile, &HeadParameters::key_clip)
                                             : "searched for each row");
  Row(out, "value clip", ClipText(profile, &HeadParameters::value_clip));
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
}

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

absl::Status Inspect(const std::filesystem::path& path, Streams streams) {
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
  return absl::OkStatus();
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
  streams.out << path.string() << ": OK, profile " << id << "\n";
  return absl::OkStatus();
}

}  // namespace crumb::calibrate
