// SPDX-License-Identifier: Apache-2.0
#include "daemon/ctl/selection.h"

#include <charconv>
#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

#include "daemon/ctl/format.h"
#include "proto/base/file.h"
#include "proto/base/status_macros.h"

namespace crumb {

absl::StatusOr<v1::NamespaceInfo> SelectNamespace(const v1::GetStatusReply& status,
                                                  const std::string& text) {
  const std::string digits = absl::AsciiStrToLower(text);
  std::vector<const v1::NamespaceInfo*> found;
  for (const v1::NamespaceInfo& space : status.namespaces()) {
    if (absl::StartsWith(Hex(space.namespace_id()), digits)) {
      found.push_back(&space);
    }
  }
  if (found.size() == 1) {
    return *found.front();
  }
  if (found.empty()) {
    return absl::NotFoundError(
        text.empty()
            ? "the daemon holds no namespace yet: publish something first"
            : absl::StrCat("no namespace starts with ", text, ": `crumbctl status` lists them"));
  }
  std::string message =
      absl::StrCat(found.size(), " namespaces ", text.empty() ? "are there" : "start with " + text,
                   ": say which by --namespace:");
  for (const v1::NamespaceInfo* space : found) {
    absl::StrAppend(&message, "\n  ", Hex(space->namespace_id(), 6), "  tenant ", space->tenant(),
                    ", profile ", Hex(space->profile_id(), 6), ", context \"",
                    Printable(space->context_key()), "\"");
  }
  return absl::InvalidArgumentError(message);
}

absl::StatusOr<std::vector<uint32_t>> ParseTokenText(const std::string& text) {
  std::vector<uint32_t> tokens;
  for (const absl::string_view word :
       absl::StrSplit(text, absl::ByAnyChar(", \t\r\n"), absl::SkipEmpty())) {
    uint32_t token = 0;
    const char* const end = word.data() + word.size();
    const auto [stop, error] = std::from_chars(word.data(), end, token);
    if (error != std::errc() || stop != end) {
      return absl::InvalidArgumentError(
          absl::StrCat("token ", tokens.size(), " is \"", word,
                       "\": write ids as whole numbers, separated by commas or white space"));
    }
    tokens.push_back(token);
  }
  if (tokens.empty()) {
    return absl::InvalidArgumentError("no tokens: give one id at least");
  }
  return tokens;
}

absl::StatusOr<std::vector<uint32_t>> ReadTokenFile(const std::string& path) {
  // As many ids as a prompt may have, 1,048,576, with ten digits each.
  constexpr size_t kMaxBytes = size_t{16} << 20;
  CRUMB_ASSIGN_OR_RETURN(const std::string text,
                         ReadText(path == "-" ? "/dev/stdin" : path, kMaxBytes));
  return ParseTokenText(text);
}

}  // namespace crumb
