// SPDX-License-Identifier: Apache-2.0
#include "client/session/prefix.h"

#include <utility>

#include "absl/strings/str_cat.h"

#include "client/transport/page_upload.h"
#include "proto/base/status_macros.h"
#include "proto/base/streaming_copy.h"

namespace crumb {

Prefix::Prefix(std::shared_ptr<Session> session,  // shared: see the header.
               const FoundPrefix& found,
               std::unique_ptr<PageSource> source,
               int gpu)
    : session_(std::move(session)),
      lease_(found.lease),
      num_pages_(static_cast<uint32_t>(found.pages.size())),
      matched_tokens_(found.matched_tokens),
      trimmed_tokens_(found.trimmed_tokens),
      source_(std::move(source)),
      gpu_(gpu) {}

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

namespace {

// What the copies say, and then the lease.
class PrefixUpload : public GpuUpload {
 public:
  PrefixUpload(Prefix* prefix, std::unique_ptr<PageUpload> pages)
      : prefix_(prefix), pages_(std::move(pages)) {}

  const PrefixHandle& prefix() const override { return *prefix_; }
  const std::byte* Page(PageIdx page, PageEncoding encoding) const override {
    return pages_->Page(page, encoding);
  }
  absl::Status DelayUntilLayer(uint32_t layer, GpuStream stream) const override {
    return pages_->DelayUntilLayer(layer, stream);
  }
  size_t copied_bytes() const override { return pages_->copied_bytes(); }
  const absl::Status& registration() const override { return pages_->registration(); }
  absl::Status Validate() override {
    CRUMB_RETURN_IF_ERROR(pages_->Validate());
    return prefix_->Validate();
  }

 private:
  Prefix* const prefix_;
  const std::unique_ptr<PageUpload> pages_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<GpuUpload>> Prefix::UploadToGpu(const GpuUploadOptions& options) {
  if (gpu_ < 0 || source_ == nullptr) {
    return absl::FailedPreconditionError(
        source_ == nullptr ? "a prefix without pages has nothing to bring to a GPU"
                           : "ClientOptions::gpu is -1; name the GPU that the engine runs on");
  }
  // A pull's bytes must have come before they are copied on.
  CRUMB_RETURN_IF_ERROR(
      session_->planes().map == nullptr
          ? source_->WaitForLayer(session_->info().profile->geometry().num_layers - 1)
          : absl::OkStatus());
  CRUMB_ASSIGN_OR_RETURN(std::unique_ptr<PageUpload> pages,
                         PageUpload::Start({.geometry = session_->info().profile->geometry(),
                                            .heads = session_->info().heads,
                                            .num_pages = num_pages_},
                                           gpu_, options, source_.get()));
  return std::make_unique<PrefixUpload>(this, std::move(pages));
}

absl::Status Prefix::CopyPage(PageIdx page, PageEncoding encoding, std::span<std::byte> image) {
  const Geometry& geometry = session_->info().profile->geometry();
  const HeadRange& heads = session_->info().heads;
  const size_t block_bytes = geometry.HeadBlockBytes(encoding);
  if (image.size() != heads.count * geometry.HeadRangeBytes(encoding)) {
    return absl::InvalidArgumentError(
        absl::StrCat("image has ", image.size(), " bytes, a page of this encoding has ",
                     heads.count * geometry.HeadRangeBytes(encoding)));
  }
  if (page.value() >= num_pages_ || source_->HeadBlock(page, encoding, 0, heads.first) == nullptr) {
    return absl::NotFoundError(absl::StrCat("page ", page.value(), " of ", num_pages_,
                                            " is not there in ",
                                            encoding == PageEncoding::kInt2 ? "INT2" : "BF16"));
  }
  CRUMB_RETURN_IF_ERROR(source_->WaitForLayer(geometry.num_layers - 1));
  size_t offset = 0;
  for (uint32_t head = heads.first; head < heads.first + heads.count; ++head) {
    for (uint32_t layer = 0; layer < geometry.num_layers; ++layer, offset += block_bytes) {
      StreamingCopy({source_->HeadBlock(page, encoding, layer, head), block_bytes},
                    image.subspan(offset, block_bytes));
    }
  }
  return absl::OkStatus();
}

}  // namespace crumb
