// SPDX-License-Identifier: Apache-2.0
//
// What a reader of mapped blocks checks, before and after.
#pragma once

#include "absl/status/status.h"

#include "client/transport/page_source.h"
#include "proto/base/ids.h"
#include "proto/page/page_header.h"

namespace crumb {

// FAILED_PRECONDITION, naming page and field: the header is not what the lease named. INTERNAL: it
// lacks a head of `heads`.
absl::Status CheckLeasedHeader(const PageHeader& header,
                               const PageExpectation& expected,
                               HeadRange heads);

// That a block has been reused since its lease: FAILED_PRECONDITION with both generations.
absl::Status BlockHasMoved(PageIdx page, Generation found, Generation leased);

// Between reads of page bytes and the loads of generations that vouch for them.
void OrderReadsBefore();

// The status, saying which page it is about.
absl::Status InPage(PageIdx page, const absl::Status& status);

}  // namespace crumb
