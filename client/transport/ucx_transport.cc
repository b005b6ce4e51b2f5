// SPDX-License-Identifier: Apache-2.0
#include "client/transport/ucx_transport.h"

#include <memory>
#include <utility>
#include <vector>

#include "client/transport/pull_table.h"
#include "client/transport/ucx_link.h"
#include "client/transport/ucx_pull.h"
#include "proto/base/status_macros.h"

namespace crumb {
namespace {

// The connections of a session, and what comes over any of them.
struct UcxLinks {
  std::shared_ptr<PullTable> pulls;             // shared: with each link.
  std::vector<std::shared_ptr<UcxLink>> links;  // shared: with nobody; made so by UcxLink.
};

class UcxSource final : public PageSource {
 public:
  // shared: see ConnectUcxWithOptions.
  UcxSource(std::shared_ptr<const UcxLinks> links,
            std::shared_ptr<UcxPull> pull,
            uint64_t request_id)
      : links_(std::move(links)), pull_(std::move(pull)), request_id_(request_id) {}
  UcxSource(const UcxSource&) = delete;
  UcxSource& operator=(const UcxSource&) = delete;
  ~UcxSource() override {
    links_->pulls->Remove(request_id_);
    if (pull_->landed_bytes() < pull_->total_bytes()) {
      links_->links.front()->CancelPull(request_id_);
    }
  }

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
  const std::shared_ptr<const UcxLinks> links_;
  const std::shared_ptr<UcxPull> pull_;
  const uint64_t request_id_;
};

class UcxTransport final : public PageTransport {
 public:
  // shared: see ConnectUcxWithOptions.
  UcxTransport(const UcxTransportOptions& options,
               std::shared_ptr<const UcxLinks> links,
               const Clock& clock)
      : options_(options),
        clock_(clock),
        links_(std::move(links)),
        buffers_(options.max_kept_bytes) {}

  absl::StatusOr<std::unique_ptr<PageSource>> Open(const LeasedPrefix& prefix,
                                                   absl::Time deadline) override {
    for (const auto& link : links_->links) {
      link->Reconnect();
    }
    UcxLink& asking = *links_->links.front();
    CRUMB_ASSIGN_OR_RETURN(
        auto pull,
        UcxPull::Create(asking.session(), prefix, buffers_,
                        {options_.ordered_layers, options_.chunk_bytes}, deadline, clock_));
    const uint64_t request_id = links_->pulls->NewRequestId();
    links_->pulls->Add(request_id, pull);
    auto source = std::make_unique<UcxSource>(links_, pull, request_id);
    CRUMB_RETURN_IF_ERROR(asking.StartPull(request_id, std::move(pull)));
    return source;
  }

  absl::Status SendPages(PublishId publish,
                         uint64_t offset,
                         std::span<const OutgoingPage> pages,
                         absl::Time deadline) override {
    return links_->links.front()->SendPages(publish, offset, pages, deadline);
  }

 private:
  const UcxTransportOptions options_;
  const Clock& clock_;
  const std::shared_ptr<const UcxLinks> links_;
  BufferPool buffers_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<PageTransport>> ConnectUcxWithOptions(
    const UcxTransportOptions& options,
    const SessionInfo& session,
    absl::Time deadline,
    const Clock& clock) {
  if (options.num_links == 0) {
    return absl::InvalidArgumentError("UcxTransportOptions::num_links is 0; use at least one link");
  }
  // shared: by the transport and the sources that it opened, which may outlive it.
  const auto links = std::make_shared<UcxLinks>();
  links->pulls = std::make_shared<PullTable>();
  for (uint32_t idx = 0; idx < options.num_links; ++idx) {
    CRUMB_ASSIGN_OR_RETURN(auto link,
                           UcxLink::Connect(options, session, links->pulls, deadline, clock));
    links->links.push_back(std::move(link));
  }
  return std::make_unique<UcxTransport>(options, links, clock);
}

absl::StatusOr<std::unique_ptr<PageTransport>> ConnectUcx(const SessionInfo& session,
                                                          absl::Time deadline) {
  return ConnectUcxWithOptions({}, session, deadline);
}

}  // namespace crumb
