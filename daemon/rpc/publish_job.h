// SPDX-License-Identifier: Apache-2.0
//
// Staged pages of one publish, as the demotion pool runs them: writes them into the store's blocks,
// and then, if they are the last, makes all of the publish visible. Holds all that it touches, so
// the engine may die at any moment.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "daemon/demote/demote_pool.h"
#include "daemon/demote/page_writer.h"
#include "daemon/rpc/rpc_context.h"
#include "daemon/rpc/session_registry.h"
#include "daemon/store/page_store.h"
#include "daemon/transfer/staging_memory.h"

namespace crumb {

class PublishJob : public DemoteJob {
 public:
  // Called once, unless the pool refuses the job. What it was given is not read any more.
  using Done = std::function<void(const absl::StatusOr<CommitResult>&)>;

  struct Inputs {
    std::shared_ptr<const AttachedEngine> session;  // shared: it may end meanwhile.
    PublishId publish;
    std::vector<StagedPage> staged;               // At least one.
    std::shared_ptr<const StagingMemory> memory;  // shared: the session may give another.
    bool commits = true;                          // Else the result of OK is empty.
  };

  // As PageStore::BeginWrite and PlanPages.
  static absl::StatusOr<std::unique_ptr<PublishJob>> Create(RpcContext& context,
                                                            Inputs inputs,
                                                            Done done);

  size_t num_pages() const override { return tasks_.size(); }
  uint64_t group() const override { return inputs_.publish.value(); }
  absl::Status RunPage(size_t index, DemoteScratch& scratch) override;
  void Finish(absl::Status status) override;

 private:
  PublishJob(RpcContext& context, Inputs inputs, Done done)
      : context_(context), inputs_(std::move(inputs)), done_(std::move(done)) {}

  // On which it is demoted, with a place for its copy.
  PageDevice DeviceFor(const PageTask& task) const;
  PageOwner owner() const { return {*inputs_.session->profile, inputs_.session->heads}; }

  RpcContext& context_;
  Inputs inputs_;  // Constant until Finish, which lets go of the memory.
  const Done done_;
  WriteGuard guard_;
  std::vector<PageTask> tasks_;
  std::vector<WrittenPage> written_;  // Of each task.
};

}  // namespace crumb
