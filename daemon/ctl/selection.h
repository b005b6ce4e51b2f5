// SPDX-License-Identifier: Apache-2.0
//
// What the operator points at: a namespace and tokens. INVALID_ARGUMENT says how to do it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "proto/crumb/v1/admin.pb.h"

namespace crumb {

// The namespace that `text`, the first digits of its id, names; the only one there is if `text` is
// empty. NOT_FOUND: none. INVALID_ARGUMENT: several; lists them.
absl::StatusOr<v1::NamespaceInfo> SelectNamespace(const v1::GetStatusReply& status,
                                                  const std::string& text);

// Token ids, separated by commas or white space.
absl::StatusOr<std::vector<uint32_t>> ParseTokenText(const std::string& text);
// The same in a file; "-" is standard input. NOT_FOUND: no such file.
absl::StatusOr<std::vector<uint32_t>> ReadTokenFile(const std::string& path);

}  // namespace crumb
