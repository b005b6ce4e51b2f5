// SPDX-License-Identifier: Apache-2.0
//
// The names in a profile file, which its writer and its reader share. crumb/cuda/profile.h says
// what they mean; file_metadata.h has those that statistics share.
#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"

namespace crumb::profile_file {

inline constexpr char kFormat[] = "crumb.profile.v1";

inline constexpr char kCodecKey[] = "codec";
inline constexpr char kPageTokensKey[] = "page_tokens";
inline constexpr char kSinkTokensKey[] = "sink_tokens";
inline constexpr char kRecentTokensKey[] = "recent_tokens";
inline constexpr char kChoicesKey[] = "choices";

inline constexpr char kKeyRotation[] = "key_rotation";
inline constexpr char kQueryRotation[] = "query_rotation";
inline constexpr char kValueRotation[] = "value_rotation";
inline constexpr char kKeyMean[] = "key_mean";
inline constexpr char kKeyFeedback[] = "key_feedback";
inline constexpr char kKeyMetric[] = "key_metric";
inline constexpr char kQueryMean[] = "query_mean";
inline constexpr char kKeyClip[] = "key_clip";
inline constexpr char kValueClip[] = "value_clip";
inline constexpr char kValueLevels[] = "value_levels";
inline constexpr char kKeyRanges[] = "key_ranges";

// "key_rotation.7".
inline std::string LayerTensor(const char* tensor, uint32_t layer) {
  return absl::StrCat(tensor, ".", layer);
}

}  // namespace crumb::profile_file
