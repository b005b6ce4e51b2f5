// SPDX-License-Identifier: Apache-2.0
#include "proto/base/arguments.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace crumb {

absl::Status CheckFlagsHaveValues(int argc, const char* const* argv) {
  for (int i = 1; i < argc; ++i) {
    const absl::string_view argument = argv[i];
    if (argument == "--") {
      break;
    }
    // The first "=" ends the name: in --tokens==, the value is "=".
    if (absl::StartsWith(argument, "--") && argument.find('=') == argument.size() - 1) {
      return absl::InvalidArgumentError(absl::StrCat(
          argument, " has an empty value: write one behind the =, or leave the flag out"));
    }
  }
  return absl::OkStatus();
}

}  // namespace crumb
