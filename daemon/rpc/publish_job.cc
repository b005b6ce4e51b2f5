// SPDX-License-Identifier: Apache-2.0
#include "daemon/rpc/publish_job.h"

#include <iterator>
#include <utility>

#include "absl/time/time.h"

#include "proto/base/status_macros.h"

namespace crumb {

absl::StatusOr<std::unique_ptr<PublishJob>> PublishJob::Create(RpcContext& context,
                                                               Inputs inputs,
                                                               Done done) {
  std::unique_ptr<PublishJob> job(new PublishJob(context, std::move(inputs), std::move(done)));
  const Inputs& in = job->inputs_;
  CRUMB_ASSIGN_OR_RETURN(job->guard_, context.store.BeginWrite(in.session->id, in.publish));
  CRUMB_ASSIGN_OR_RETURN(job->tasks_, PlanPages(job->owner(), in.staged, job->guard_.blocks(),
                                                in.memory->bytes().size()));
  job->written_.resize(job->tasks_.size());
  return job;
}

absl::Status PublishJob::RunPage(size_t index, DemoteScratch& scratch) {
  const PageTask& task = tasks_[index];
  const absl::Time start = context_.clock.Now();
  absl::Status status = WritePage(owner(), task, inputs_.memory->bytes(), scratch, written_[index]);
  if (status.ok()) {
    const bool demoted = task.int2_block != nullptr && task.staged_int2 == nullptr;
    context_.metrics.OnPageWritten(demoted, context_.clock.Now() - start);
  } else if (absl::IsDataLoss(status)) {
    context_.metrics.OnChecksumFailure();
  }
  return status;
}

void PublishJob::Finish(absl::Status status) {
  guard_ = WriteGuard();
  // Before the answer, so that whoever has it finds the memory given back.
  inputs_.memory = nullptr;
  if (!status.ok()) {
    done_(status);
    return;
  }
  std::vector<WrittenBlock> all;
  for (std::vector<WrittenBlock>& of_page : written_) {
    std::move(of_page.begin(), of_page.end(), std::back_inserter(all));
  }
  done_(context_.store.CommitPublish(inputs_.session->id, inputs_.publish, all));
}

}  // namespace crumb
