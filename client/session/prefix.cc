// SPDX-License-Identifier: Apache-2.0
#include "client/session/prefix.h"

#include <utility>

#include "proto/base/status_macros.h"

namespace crumb {

Prefix::Prefix(std::shared_ptr<Session> session,  // shared: see the header.
               const FoundPrefix& found,
               std::unique_ptr<PageSource> source)
    : session_(std::move(session)),
      lease_(found.lease),
      num_pages_(static_cast<uint32_t>(found.pages.size())),
      matched_tokens_(found.matched_tokens),
      trimmed_tokens_(found.trimmed_tokens),
      source_(std::move(source)) {}

Prefix::~Prefix() {
  source_ = nullptr;  // First: a pull that is under way reads under the lease.
  if (lease_ != LeaseId()) {
    session_->ReleaseLease(lease_);
  }
}

const std::byte* Prefix::HeadBlock(PageIdx page,
                                   PageEncoding encoding,
                                   uint32_t layer,
                                   uint32_t kv_head) const {
  return source_->HeadBlock(page, encoding, layer, kv_head);
}

absl::Status Prefix::WaitForLayer(uint32_t layer) {
  return source_ == nullptr ? absl::OkStatus() : source_->WaitForLayer(layer);
}

absl::Status Prefix::Validate() {
  if (source_ == nullptr) {
    return absl::OkStatus();
  }
  CRUMB_RETURN_IF_ERROR(source_->Validate());
  // Last: what was read before this line was read under the lease.
  return session_->CheckLease(lease_);
}

}  // namespace crumb
