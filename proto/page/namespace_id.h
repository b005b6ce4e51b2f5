// SPDX-License-Identifier: Apache-2.0
//
// Names derived from content by SHA-256, the same in every process.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "proto/base/ids.h"

namespace crumb {

// The id of a profile file with these bytes.
ProfileId ComputeProfileId(std::span<const std::byte> profile_file);

// The namespace of a tenant's prefixes under one profile and context key. The context key carries
// whatever else changes the KV cache (a LoRA adapter, a cache salt); empty for none. Each part is
// hashed with its length, so no two triples share bytes.
NamespaceId ComputeNamespaceId(std::string_view tenant,
                               const ProfileId& profile_id,
                               std::string_view context_key);

}  // namespace crumb
