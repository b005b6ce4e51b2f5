// SPDX-License-Identifier: Apache-2.0
//
// Replies as JSON: the fields of admin.proto and cache.proto by their names, ids in hexadecimal,
// numbers as numbers.
#pragma once

#include "nlohmann/json_fwd.hpp"
#include "proto/crumb/v1/admin.pb.h"
#include "proto/crumb/v1/cache.pb.h"

namespace crumb {

nlohmann::ordered_json ToJson(const v1::GetStatusReply& status);
nlohmann::ordered_json ToJson(const v1::Counters& counters);
nlohmann::ordered_json ToJson(const v1::GetTreeReply& tree);
nlohmann::ordered_json ToJson(const v1::ProbeReply& probe);
nlohmann::ordered_json ToJson(const v1::EvictReply& evict);

}  // namespace crumb
