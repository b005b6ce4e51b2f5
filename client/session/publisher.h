// SPDX-License-Identifier: Apache-2.0
//
// One publish: which pages the daemon lacks, in which encoding this sequence can give them, their
// bytes into staging memory or over UCX, and the commit that makes them visible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "client/session/page_exporter.h"
#include "client/session/session.h"
#include "crumb/client.h"
#include "proto/base/clock.h"

namespace crumb {

// A page to hand over.
struct PlannedPage {
  PageIdx page;
  PageEncoding encoding = PageEncoding::kInt2;
  bool is_tail = false;  // Its BF16 rows will serve the next engine's recent window.
};

// What to hand over of `missing`: BF16 where that is asked for and held, since it serves both needs
// and is demoted by the daemon; INT2 where only that is missing and held; BF16 otherwise. Ascending
// by page. FAILED_PRECONDITION, naming the page, when neither is held of what is needed.
absl::StatusOr<std::vector<PlannedPage>> PlanPublish(const MissingPages& missing,
                                                     const PageExporter& exporter,
                                                     const Windows& windows);

// Publishes tokens[0, 64 * n) in as many steps as staging memory asks for. Blocks;
// by one thread. Errors as Client::Publish.
class Publisher {
 public:
  struct Options {
    // Of one step. At most kMaxStagingBytes; smaller costs more round trips, larger more memory.
    size_t max_step_bytes = size_t{256} << 20;
    // A commit that finds the daemon's demotion queue full is repeated, until the deadline, after
    // this long at first and twice as long each time, up to max_backoff.
    absl::Duration first_backoff = absl::Milliseconds(10);
    absl::Duration max_backoff = absl::Milliseconds(250);
  };

  Publisher(const Options& options,
            const std::shared_ptr<Session>& session,  // shared: as Session says.
            PageExporter& pages,
            const Clock& clock)
      : options_(options), session_(session), pages_(pages), clock_(clock) {}

  absl::StatusOr<PublishResult> Run(const std::string& context_key,
                                    std::span<const uint32_t> tokens,
                                    absl::Time deadline);

 private:
  // How many of the first pages fit into so many bytes; at least one of any.
  size_t CountFitting(std::span<const PlannedPage> plan, size_t max_bytes) const;
  // Where to end the steps before the last, in tokens; none if all fits into one.
  std::vector<size_t> Cuts(std::span<const PlannedPage> plan) const;
  // Publishes `tokens` if that fits into one step, and returns nothing; otherwise publishes
  // nothing, and returns Cuts.
  absl::StatusOr<std::vector<size_t>> Step(const std::string& context_key,
                                           std::span<const uint32_t> tokens,
                                           absl::Time deadline);
  absl::Status HandOver(PublishId publish,
                        const std::vector<PlannedPage>& plan,
                        absl::Time deadline);
  absl::StatusOr<std::vector<StagedImage>> FillStaging(std::span<const PlannedPage> plan,
                                                       std::span<std::byte> staging,
                                                       absl::Time deadline);
  absl::Status CommitFromStaging(PublishId publish,
                                 const std::vector<PlannedPage>& plan,
                                 absl::Time deadline);
  absl::Status CommitOverUcx(PublishId publish,
                             const std::vector<PlannedPage>& plan,
                             absl::Time deadline);
  // Sends pages by way of `buffer`, which grows to hold them, and names them in `params`.
  absl::Status SendOverUcx(std::span<const PlannedPage> pages,
                           absl::Time deadline,
                           std::vector<std::byte>& buffer,
                           CommitParams& params);
  // RESOURCE_EXHAUSTED: the daemon's demotion queue was full until the deadline.
  absl::Status Commit(const CommitParams& params, absl::Time deadline);
  size_t PageBytes(PageEncoding encoding) const;
  size_t TotalBytes(std::span<const PlannedPage> plan) const;

  const Options options_;
  const std::shared_ptr<Session> session_;
  PageExporter& pages_;
  const Clock& clock_;
  PublishResult result_;
};

}  // namespace crumb
