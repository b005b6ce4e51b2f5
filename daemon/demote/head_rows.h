// SPDX-License-Identifier: Apache-2.0
//
// One KV head of a staged page, all layers: copied, checked, brought into the form in which rows
// are stored, demoted. The steps of WritePage (page_writer.h), whose errors these are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "absl/status/status.h"

#include "daemon/demote/page_writer.h"
#include "proto/page/page_format.h"

namespace crumb {

// "staged page 7 (BF16)".
std::string Name(const StagedPage& staged);

// Bytes of one head of a page.
size_t HeadBytes(const PageOwner& owner, PageEncoding encoding);

// Copies the session's head `head` of a staged page to `target`, and compares what was copied with
// the checksum that came with it. DATA_LOSS. BF16 is then in the cache, for the steps that follow;
// INT2, of which little is looked at, is not.
absl::Status CopyHeadChecked(const PageOwner& owner,
                             const StagedPage& staged,
                             uint32_t head,
                             std::span<const std::byte> staging,
                             std::span<std::byte> target);

// INVALID_ARGUMENT: BF16 rows of the session's head `head` have NaN or inf; with layer, head and
// token.
absl::Status CheckRows(const PageOwner& owner,
                       const StagedPage& staged,
                       uint32_t head,
                       std::span<const std::byte> rows);

// BF16 rows of the session's head `head` as they came, in the form in which they are stored:
// rotated into `stored`, which also checks them; or, if that is what they came as, copied there,
// unless it is the same memory. INVALID_ARGUMENT: NaN or inf, with layer, head and token.
absl::Status StoreRows(const PageOwner& owner,
                       const StagedPage& staged,
                       uint32_t head,
                       std::span<const std::byte> rows,
                       std::span<std::byte> stored);

// Demotes stored rows to `codes`; `crc32c` has the checksum of those. INVALID_ARGUMENT as
// StoreRows.
absl::Status DemoteHead(const PageOwner& owner,
                        const StagedPage& staged,
                        uint32_t head,
                        std::span<const std::byte> stored,
                        std::span<std::byte> codes,
                        uint32_t& crc32c);

// The scales and minima of two-bit rows of all of the session's heads. INVALID_ARGUMENT: NaN or
// inf.
absl::Status CheckFiniteMeta(const PageOwner& owner,
                             const StagedPage& staged,
                             std::span<const std::byte> image);

}  // namespace crumb
