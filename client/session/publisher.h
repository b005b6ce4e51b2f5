// SPDX-License-Identifier: Apache-2.0
//
// One publish: which pages the daemon lacks, in which encoding this sequence can give them, their
// bytes part by part into staging memory or over UCX, and the commit that makes all of them
// visible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "client/session/page_exporter.h"
#include "client/session/part_writes.h"
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

// `plan` in parts of at most `max_bytes`, or as much as the largest page has: what is staged and
// written at a time. BF16 pages are in the first parts, since they take the daemon longest; a
// part's own pages ascend.
std::vector<std::vector<PlannedPage>> CutIntoParts(std::vector<PlannedPage> plan,
                                                   const Geometry& geometry,
                                                   uint32_t num_heads,
                                                   size_t max_bytes);

// Publishes tokens[0, 64 * n): while the daemon writes some parts, the next is staged. Blocks; by
// one thread. Errors as Client::Publish.
class Publisher {
 public:
  struct Options {
    // Larger ones cost memory and a longer wait for the first and the last, smaller ones calls.
    size_t max_part_bytes = size_t{4} << 20;
    // Whatever the prefix is; but room for two parts. What the daemon keeps up with is not touched.
    size_t max_staging_bytes = size_t{128} << 20;
    PartWrites::Options writes = {};  // Its slots, if there is room for so many.
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
  using Part = std::vector<PlannedPage>;
  // Puts a part where the daemon finds it, for the slot-th place of staging memory.
  using StagePart = absl::FunctionRef<absl::StatusOr<CommitParams>(const Part& part, size_t slot)>;

  absl::Status HandOver(PublishId publish, const std::vector<Part>& parts, absl::Time deadline);
  absl::Status HandOverByMap(PublishId publish,
                             const std::vector<Part>& parts,
                             size_t num_slots,
                             absl::Time deadline);
  absl::Status HandOverByUcx(PublishId publish,
                             const std::vector<Part>& parts,
                             size_t num_slots,
                             absl::Time deadline);
  // `daemon_may_read`: an answer is missing, so that staging memory must not be written again.
  absl::Status WriteAll(PublishId publish,
                        const std::vector<Part>& parts,
                        size_t num_slots,
                        StagePart stage,
                        absl::Time deadline,
                        bool* daemon_may_read);
  absl::StatusOr<std::vector<StagedImage>> FillStaging(std::span<const PlannedPage> part,
                                                       std::span<std::byte> staging,
                                                       absl::Time deadline);
  // RESOURCE_EXHAUSTED: the daemon's demotion queue was full until the deadline.
  absl::Status Commit(const CommitParams& params, absl::Time deadline);
  size_t PageBytes(PageEncoding encoding) const;
  // What a place of staging memory must have.
  size_t LargestBytes(const std::vector<Part>& parts) const;

  const Options options_;
  const std::shared_ptr<Session> session_;
  PageExporter& pages_;
  const Clock& clock_;
  PublishResult result_;
};

}  // namespace crumb
