// SPDX-License-Identifier: Apache-2.0
#include "client/transport/leased_block.h"

#include <atomic>

#include "absl/strings/str_cat.h"

namespace crumb {

absl::Status InPage(PageIdx page, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat("page ", page.value(), ": ", status.message()));
}

absl::Status CheckLeasedHeader(const PageHeader& header,
                               const PageExpectation& expected,
                               HeadRange heads) {
  if (absl::Status status = CheckPageHeader(header, expected); !status.ok()) {
    return InPage(expected.page_idx, status);
  }
  if ((header.heads_present & heads.Mask()) != heads.Mask()) {
    return absl::InternalError(absl::StrCat("page ", expected.page_idx.value(), ": has KV heads ",
                                            absl::Hex(header.heads_present), ", this rank reads ",
                                            absl::Hex(heads.Mask())));
  }
  return absl::OkStatus();
}

absl::Status BlockHasMoved(PageIdx page, Generation found, Generation leased) {
  return absl::FailedPreconditionError(
      absl::StrCat("page ", page.value(), ": its block is of generation ", found.value(),
                   " now, the lease was for ", leased.value(),
                   "; the page was dropped and what was read of it is not to be used: look the "
                   "prefix up again"));
}

// The reader's half of a sequence lock: reads of page bytes before it, loads of generations after.
void OrderReadsBefore() {
#if defined(__SANITIZE_THREAD__)
  // The sanitizer knows no fences, and sees nothing of the other process either.
  std::atomic_signal_fence(std::memory_order_acquire);
#else
  std::atomic_thread_fence(std::memory_order_acquire);
#endif
}

}  // namespace crumb
