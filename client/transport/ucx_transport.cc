// SPDX-License-Identifier: Apache-2.0
#include "client/transport/ucx_transport.h"

#include <utility>

#include "client/transport/ucx_link.h"
#include "client/transport/ucx_pull.h"
#include "proto/base/status_macros.h"

namespace crumb {
namespace {

class UcxSource final : public PageSource {
 public:
  UcxSource(std::shared_ptr<UcxLink> link, std::shared_ptr<UcxPull> pull, uint64_t request_id)
      : link_(std::move(link)), pull_(std::move(pull)), request_id_(request_id) {}
  UcxSource(const UcxSource&) = delete;
  UcxSource& operator=(const UcxSource&) = delete;
  ~UcxSource() override { link_->EndPull(request_id_); }

  const std::byte* HeadBlock(PageIdx page,
                             PageEncoding encoding,
                             uint32_t layer,
                             uint32_t kv_head) const override {
    return pull_->HeadBlock(page, encoding, layer, kv_head);
  }
  uint32_t first_image_layer() const override { return pull_->ordered_layers(); }
  absl::Status RegisterWithGpu() override { return pull_->RegisterWithGpu(); }
  absl::Status WaitForLayer(uint32_t layer) override { return pull_->WaitForLayer(layer); }
  absl::Status Validate() override { return pull_->Validate(); }
  size_t copied_bytes() const override { return pull_->landed_bytes(); }

 private:
  const std::shared_ptr<UcxLink> link_;  // shared: see UcxLink::Connect.
  const std::shared_ptr<UcxPull> pull_;
  const uint64_t request_id_;
};

class UcxTransport final : public PageTransport {
 public:
  explicit UcxTransport(std::shared_ptr<UcxLink> link) : link_(std::move(link)) {}

  absl::StatusOr<std::unique_ptr<PageSource>> Open(const LeasedPrefix& prefix,
                                                   absl::Time deadline) override {
    CRUMB_ASSIGN_OR_RETURN(auto pull, UcxPull::Create(link_->session(), prefix, link_->buffers(),
                                                      link_->cut(), deadline, link_->clock()));
    CRUMB_ASSIGN_OR_RETURN(const uint64_t request_id, link_->StartPull(pull));
    return std::make_unique<UcxSource>(link_, std::move(pull), request_id);
  }

  absl::Status SendPages(PublishId publish,
                         std::span<const OutgoingPage> pages,
                         absl::Time deadline) override {
    return link_->SendPages(publish, pages, deadline);
  }

 private:
  const std::shared_ptr<UcxLink> link_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<PageTransport>> ConnectUcxWithOptions(
    const UcxTransportOptions& options,
    const SessionInfo& session,
    absl::Time deadline,
    const Clock& clock) {
  CRUMB_ASSIGN_OR_RETURN(auto link, UcxLink::Connect(options, session, deadline, clock));
  return std::make_unique<UcxTransport>(std::move(link));
}

absl::StatusOr<std::unique_ptr<PageTransport>> ConnectUcx(const SessionInfo& session,
                                                          absl::Time deadline) {
  return ConnectUcxWithOptions({}, session, deadline);
}

}  // namespace crumb
