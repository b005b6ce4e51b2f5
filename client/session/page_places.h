// SPDX-License-Identifier: Apache-2.0
//
// The page table of a lookup's answer, from the wire into plain structs. The daemon's, but checked:
// a table of another length would be read beyond its end.
#pragma once

#include <cstddef>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "client/transport/page_source.h"
#include "proto/crumb/v1/cache.pb.h"

namespace crumb {

// Both: INTERNAL, when the daemon is of another release than this library.

absl::StatusOr<std::vector<PagePlaces>> UnpackPages(const v1::PageTable& table, size_t num_pages);

// Those of the table that are in a GPU's memory, beside places that UnpackPages has made.
absl::Status UnpackGpuPages(const v1::PageTable& table, std::vector<PagePlaces>* pages);

}  // namespace crumb
