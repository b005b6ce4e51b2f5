// SPDX-License-Identifier: Apache-2.0
//
// From pages as an engine staged them to pages as the store keeps them: copy, check, rotate and
// demote. Pure work on memory: knows neither RPCs nor threads.
//
// The engine can change staged bytes while they are read. So each byte is read once, by the copy
// whose checksum is computed on the way; whatever decides or is kept afterwards is that copy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "crumb/cuda/profile.h"
#include "daemon/demote/demote_pool.h"
#include "daemon/demote/device_demoter.h"
#include "daemon/store/page_store.h"
#include "daemon/tier/copy_tier.h"
#include "proto/base/ids.h"
#include "proto/page/head_range.h"

namespace crumb {

// In the order that a commit lists the encodings of one page.
enum class StagedEncoding : uint8_t {
  kInt2 = 1,       // As stored.
  kBf16 = 2,       // As stored: rotated and mean-shifted rows.
  kBf16Plain = 3,  // As the model made them, keys after RoPE.
};

// One page as handed over: the image of the session's heads, [kv_head][layer].
struct StagedPage {
  PageIdx page;
  StagedEncoding encoding = StagedEncoding::kInt2;
  uint64_t offset = 0;                // In the staging memory.
  std::vector<uint32_t> head_crc32c;  // Of each of the session's heads, as handed over.
};

// Where one page's blocks get their bytes from. Pointers into what PlanPages was given.
struct PageTask {
  const StagedPage* staged_int2 = nullptr;
  const StagedPage* staged_bf16 = nullptr;    // Plain or not.
  const WritableBlock* int2_block = nullptr;  // From staged_int2 if there is one, else demoted.
  const WritableBlock* bf16_block = nullptr;
};

// Of whom the pages are.
struct PageOwner {
  const Profile& profile;
  HeadRange heads;  // count is never 0 here.
};

// Pairs staged pages with the blocks that wait for them; `missing` is in the order of the plan. A
// BF16 page fills the page's missing INT2 block too. INVALID_ARGUMENT, naming the page: out of
// order, twice, not asked for, outside of the staging memory, or with another number of checksums.
// A block that nothing fills is left to the store's commit to refuse.
absl::StatusOr<std::vector<PageTask>> PlanPages(const PageOwner& owner,
                                                std::span<const StagedPage> staged,
                                                std::span<const WritableBlock> missing,
                                                uint64_t staging_bytes);

// By which a page is demoted, if it can.
struct PageDevice {
  DeviceDemoter* demoter = nullptr;              // Null: the CPU.
  std::optional<CopyPlace> copy = std::nullopt;  // Of task.int2_block's copy in the tier.
  bool holds_staging = false;                    // DeviceDemoter::Hold.
};

enum class DemotedBy { kNone, kCpu, kDevice };

struct WrittenPage {
  std::vector<WrittenBlock> blocks;  // INT2 first.
  DemotedBy demoted_by = DemotedBy::kNone;
  absl::Status device_error;  // Why it was the CPU and not the device, if that failed.
};

// Does one page; at most its two blocks are written.
// DATA_LOSS, naming page, head and both checksums: the copied bytes have another checksum than was
// said. INVALID_ARGUMENT: NaN or inf, with layer, head and token. RESOURCE_EXHAUSTED: the system
// has no memory for a block. Blocking, Thread-safe for different pages and scratch.
absl::Status WritePage(const PageOwner& owner,
                       const PageTask& task,
                       std::span<const std::byte> staging,
                       const PageDevice& device,
                       DemoteScratch& scratch,
                       WrittenPage& written);

}  // namespace crumb
