// SPDX-License-Identifier: Apache-2.0
#include "proto/page/check_heads.h"

#include <string>

#include "absl/strings/str_cat.h"

namespace crumb {

absl::Status CheckHeads(std::string_view option, const HeadRange& heads, uint32_t num_kv_heads) {
  if (heads.IsWithin(num_kv_heads)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat(std::string(option), " is [", heads.first, ", ", heads.first, " + ", heads.count,
                   "); it must be within the profile's ", num_kv_heads, " KV heads"));
}

}  // namespace crumb
