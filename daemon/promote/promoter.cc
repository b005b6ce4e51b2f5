// SPDX-License-Identifier: Apache-2.0
#include "daemon/promote/promoter.h"

#include <utility>

#include "daemon/log/log.h"

namespace crumb {
namespace {

// Large enough for the bus, small enough that little is held by what is on its way.
constexpr size_t kBatchBytes = size_t{32} << 20;

}  // namespace

Promoter::Promoter(PageStore& store, CopyTier& tier)
    : store_(store), tier_(tier), thread_([this] { RunThread(); }) {}

Promoter::~Promoter() {
  store_.StopCopies();
  thread_.join();
}

void Promoter::RunThread() {
  while (store_.AwaitCopyWork()) {
    do {
      RenewSegments();
    } while (CopyBatchOnce());
  }
}

void Promoter::RenewSegments() {
  for (const uint32_t segment : store_.TakeSpentSegments()) {
    unready_.push_back(segment);
  }
  std::vector<uint32_t> failed;
  for (const uint32_t segment : unready_) {
    if (absl::Status status = tier_.Renew(segment); status.ok()) {
      store_.ReturnSegment(segment);
    } else {
      if (failed.empty()) {
        LogEvent(LogLevel::kWarning, "segment_not_renewed",
                 {{"segment", segment}, {"status", status}});
      }
      failed.push_back(segment);
    }
  }
  unready_ = std::move(failed);
}

bool Promoter::CopyBatchOnce() {
  CopyBatch batch = store_.BeginCopies(kBatchBytes);
  const std::vector<absl::Status> statuses = tier_.Write(batch.copies());
  bool any_failed = false;
  for (size_t i = 0; i < statuses.size(); ++i) {
    if (statuses[i].ok()) {
      batch.SetArrived(i);
    } else if (!any_failed) {  // One line a batch: they fail for one reason.
      any_failed = true;
      LogEvent(LogLevel::kWarning, "copies_failed",
               {{"of", statuses.size()}, {"status", statuses[i]}});
    }
  }
  return !statuses.empty();
}

}  // namespace crumb
