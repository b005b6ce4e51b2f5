// SPDX-License-Identifier: Apache-2.0
//
// Client: hands an engine's calls to the session that it keeps. No engine thread waits for another.
#pragma once

#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "client/session/page_exporter.h"
#include "client/session/session.h"
#include "client/session/session_keeper.h"
#include "crumb/client.h"
#include "proto/base/clock.h"

namespace crumb {

// Thread-safe.
class ClientImpl : public Client {
 public:
  // As SessionKeeper's.
  ClientImpl(const ClientOptions& options, const GpuUuid& gpu_uuid, const Clock& clock);

  absl::Status WaitAttached(absl::Duration timeout) override {
    return keeper_.WaitAttached(timeout);
  }
  ClientState state() const override { return keeper_.state(); }
  // shared: see Client.
  absl::StatusOr<std::shared_ptr<PrefixHandle>> Lookup(std::span<const uint32_t> tokens,
                                                       const LookupOptions& options) override;
  absl::StatusOr<PublishResult> Publish(const Sequence& sequence,
                                        std::span<const uint32_t> tokens,
                                        const PublishOptions& options) override;
  absl::StatusOr<PublishResult> PublishFromGpu(const GpuPages& pages,
                                               std::span<const uint32_t> tokens,
                                               const PublishOptions& options) override;

 private:
  // Whether rows are of this client's profile and heads.
  absl::Status CheckRows(const ProfileId& profile_id, const HeadRange& heads) const;
  absl::StatusOr<PublishResult> PublishPages(PageExporter& exporter,
                                             std::span<const uint32_t> tokens,
                                             const PublishOptions& options);
  absl::StatusOr<std::unique_ptr<PageSource>> OpenSource(const Session& session,
                                                         const FoundPrefix& found,
                                                         const LookupOptions& options,
                                                         absl::Time sent_at);

  const ClientOptions options_;
  const Clock& clock_;
  SessionKeeper keeper_;
};

}  // namespace crumb
