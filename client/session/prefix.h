// SPDX-License-Identifier: Apache-2.0
//
// What Client::Lookup returns: a leased prefix, its bytes from a PageSource, its right to them from
// the Session.
#pragma once

#include <cstdint>
#include <memory>

#include "client/session/control_plane.h"
#include "client/session/session.h"
#include "client/transport/page_source.h"
#include "crumb/client.h"

namespace crumb {

// Thread-safe.
class Prefix : public PrefixHandle {
 public:
  // A miss has neither lease nor source.
  // shared: session with the client and other prefixes; it must live until the lease is released.
  Prefix(std::shared_ptr<Session> session,
         const FoundPrefix& found,
         std::unique_ptr<PageSource> source,
         int gpu = -1);
  ~Prefix() override;
  Prefix(const Prefix&) = delete;
  Prefix& operator=(const Prefix&) = delete;

  uint32_t num_pages() const override { return num_pages_; }
  const ProfileId& profile_id() const override { return session_->info().profile->id(); }
  const std::byte* HeadBlock(PageIdx page,
                             PageEncoding encoding,
                             uint32_t layer,
                             uint32_t kv_head) const override;
  absl::Status WaitForLayer(uint32_t layer) override;
  absl::Status Validate() override;

  uint32_t usable_tokens() const override { return num_pages_ * kPageTokens; }
  uint32_t matched_tokens() const override { return matched_tokens_; }
  uint32_t trimmed_tokens() const override { return trimmed_tokens_; }
  DataPlane data_plane() const override { return session_->planes().in_use; }
  HeadRange heads() const override { return session_->info().heads; }
  int gpu() const override { return gpu_; }
  const std::byte* GpuPage(PageIdx page, PageEncoding encoding) const override {
    return page.value() < num_pages_ ? source_->GpuPage(page, encoding) : nullptr;
  }
  absl::StatusOr<std::unique_ptr<GpuUpload>> UploadToGpu(const GpuUploadOptions& options) override;
  absl::Status CopyPage(PageIdx page, PageEncoding encoding, std::span<std::byte> image) override;
  size_t copied_bytes() const override { return source_ == nullptr ? 0 : source_->copied_bytes(); }

 private:
  const std::shared_ptr<Session> session_;
  const LeaseId lease_;
  const uint32_t num_pages_;
  const uint32_t matched_tokens_;
  const uint32_t trimmed_tokens_;
  std::unique_ptr<PageSource> source_;
  const int gpu_;
};

}  // namespace crumb
