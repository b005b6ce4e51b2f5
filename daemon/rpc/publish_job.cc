// SPDX-License-Identifier: Apache-2.0
#include "daemon/rpc/publish_job.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/time/time.h"

#include "daemon/log/log.h"
#include "proto/base/status_macros.h"

namespace crumb {
namespace {

PageWork WorkOf(DemotedBy demoted_by) {
  switch (demoted_by) {
    case DemotedBy::kNone:
      return PageWork::kCopied;
    case DemotedBy::kCpu:
      return PageWork::kDemotedOnCpu;
    case DemotedBy::kDevice:
      return PageWork::kDemotedOnGpu;
  }
  return PageWork::kCopied;
}

}  // namespace

absl::StatusOr<std::unique_ptr<PublishJob>> PublishJob::Create(RpcContext& context,
                                                               Inputs inputs,
                                                               Done done) {
  std::unique_ptr<PublishJob> job(new PublishJob(context, std::move(inputs), std::move(done)));
  const Inputs& in = job->inputs_;
  std::vector<PageIdx> pages;
  for (const StagedPage& staged : in.staged) {
    pages.push_back(staged.page);
  }
  std::sort(pages.begin(), pages.end());  // PlanPages refuses them if they were not.
  CRUMB_ASSIGN_OR_RETURN(job->guard_, context.store.BeginWrite(in.session->id, in.publish, pages));
  CRUMB_ASSIGN_OR_RETURN(job->tasks_, PlanPages(job->owner(), in.staged, job->guard_.blocks(),
                                                in.memory->bytes().size()));
  job->written_.resize(job->tasks_.size());
  return job;
}

absl::Status PublishJob::RunPage(size_t index, DemoteScratch& scratch) {
  const PageTask& task = tasks_[index];
  WrittenPage& written = written_[index];
  const absl::Time start = context_.clock.Now();
  absl::Status status =
      WritePage(owner(), task, inputs_.memory->bytes(), DeviceFor(task), scratch, written);
  if (status.ok()) {
    context_.metrics.OnPageWritten(WorkOf(written.demoted_by), context_.clock.Now() - start);
  } else if (absl::IsDataLoss(status)) {
    context_.metrics.OnChecksumFailure();
  }
  if (!written.device_error.ok() && context_.metrics.OnGpuDemotionFailure() == 1) {
    LogEvent(LogLevel::kWarning, "demoted_on_the_cpu",
             {{"page", task.staged_bf16->page.value()},
              {"status", written.device_error},
              {"further", "crumb_gpu_demotion_failures_total counts them"}});
  }
  return status;
}

PageDevice PublishJob::DeviceFor(const PageTask& task) const {
  const bool demotes = task.int2_block != nullptr && task.staged_int2 == nullptr;
  if (!demotes || context_.demoter == nullptr || context_.demoter->MaxHeads(owner().profile) == 0) {
    return {};
  }
  DeviceDemoter* const demoter = context_.demoter;
  const StagingMemory& memory = *inputs_.memory;
  return {.demoter = demoter,
          .copy = guard_.ReserveCopy(*task.int2_block),
          .holds_staging =
              memory.IsHeldByDevice([demoter, &memory] { return demoter->Hold(memory.bytes()); })};
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
  for (WrittenPage& page : written_) {
    std::move(page.blocks.begin(), page.blocks.end(), std::back_inserter(all));
  }
  if (inputs_.commits) {
    done_(context_.store.CommitPublish(inputs_.session->id, inputs_.publish, all));
    return;
  }
  status = context_.store.KeepWritten(inputs_.session->id, inputs_.publish, std::move(all));
  done_(status.ok() ? absl::StatusOr<CommitResult>(CommitResult{}) : status);
}

}  // namespace crumb
