// SPDX-License-Identifier: Apache-2.0
//
// The protocol of a step, on the host.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "client/gpu/gpu_batch_impl.h"
#include "proto/base/check.h"
#include "proto/base/status_macros.h"

namespace crumb {
namespace {

absl::Status OfMember(size_t index, const absl::Status& status) {
  return status.ok()
             ? status
             : absl::Status(status.code(), absl::StrCat("member ", index, ": ", status.message()));
}

}  // namespace

absl::Status GpuBatch::Impl::CheckMember(const Member& member) const {
  if (member.sequence == nullptr || member.num_tokens == 0) {
    return absl::InvalidArgumentError(member.sequence == nullptr ? "it has no sequence"
                                                                 : "it brings no token");
  }
  const GpuSequence::Impl& sequence = member.sequence->impl();
  if (&sequence.pool() != &pool_) {
    return absl::InvalidArgumentError("its sequence is of another pool than the batch");
  }
  if (member.num_tokens > options_.max_length ||
      sequence.length() > options_.max_length - member.num_tokens) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "its sequence of ", sequence.length(), " tokens and ", member.num_tokens,
        " more pass the batch's ", options_.max_length, "; raise GpuBatch::Options::max_length"));
  }
  return absl::OkStatus();
}

absl::Status GpuBatch::Impl::CheckMembers(std::span<const Member> members) const {
  if (is_open_) {
    return absl::FailedPreconditionError(absl::StrCat(
        "a step of ", members_.size(), " members is open; call EndStep or AbandonStep first"));
  }
  if (members.empty() || members.size() > options_.max_sequences) {
    return absl::InvalidArgumentError(
        absl::StrCat("the step has ", members.size(), " members; it must have 1 to ",
                     options_.max_sequences, ", GpuBatch::Options::max_sequences"));
  }
  uint64_t num_tokens = 0;
  for (size_t i = 0; i < members.size(); ++i) {
    CRUMB_RETURN_IF_ERROR(OfMember(i, CheckMember(members[i])));
    num_tokens += members[i].num_tokens;
    if (i > 0 && members[i].num_tokens == 1 && members[i - 1].num_tokens > 1) {
      return OfMember(i, absl::InvalidArgumentError(
                             "it brings one token after a member that brings more; those of one "
                             "token come first"));
    }
  }
  if (num_tokens > options_.max_tokens) {
    return absl::InvalidArgumentError(absl::StrCat("the step has ", num_tokens,
                                                   " tokens; it may have ", options_.max_tokens,
                                                   ", GpuBatch::Options::max_tokens"));
  }
  return absl::OkStatus();
}

// Whether the members suit the graph that is to be replayed.
absl::Status GpuBatch::Impl::CheckReplay(const Step& step) const {
  if (step.replayed_rows == 0) {
    return absl::OkStatus();
  }
  if (step.members.size() > step.replayed_rows) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the step has ", step.members.size(), " members, and its layers are a graph's of ",
        step.replayed_rows, " rows (Step::replayed_rows); replay one with as many"));
  }
  if (step.members.back().num_tokens > 1) {
    return OfMember(step.members.size() - 1,
                    absl::InvalidArgumentError(absl::StrCat(
                        "it brings ", step.members.back().num_tokens,
                        " tokens; layers that are replayed take one of each sequence")));
  }
  return absl::OkStatus();
}

absl::Status GpuBatch::Impl::BeginStep(const Step& step, GpuStream stream) {
  CRUMB_RETURN_IF_ERROR(CheckMembers(step.members));
  CRUMB_RETURN_IF_ERROR(CheckReplay(step));
  const ScopedGpu current(gpu());
  CRUMB_RETURN_IF_ERROR(current.status());
  CRUMB_RETURN_IF_ERROR(CheckStream(stream));
  // Until the copies of the step before have been made, its tables must stay.
  CRUMB_RETURN_IF_ERROR(copied_->Wait());
  CRUMB_RETURN_IF_ERROR(Reserve(step.members));
  is_open_ = true;
  is_replayed_ = step.replayed_rows > 0;
  shares_prefix_ = MembersSharePrefix();
  reads_prefix_once_ = step.reads_prefix_once && shares_prefix_;
  absl::Status status = Prepare(stream);
  if (!status.ok()) {
    AbandonStep();
    tables_->Forget();
  }
  return status;
}

absl::Status GpuBatch::Impl::Reserve(std::span<const Member> members) {
  members_.clear();
  num_decoded_ = 0;
  for (const Member& member : members) {
    GpuSequence::Impl& sequence = member.sequence->impl();
    absl::Status status =
        sequence.step_tokens() == 0
            ? sequence.BeginStep(member.num_tokens)
            : absl::FailedPreconditionError(
                  "its sequence is in a step that has not ended, or twice in this one");
    if (!status.ok()) {
      status = OfMember(members_.size(), status);
      for (const Member& reserved : members_) {
        reserved.sequence->impl().AbandonStep();
      }
      members_.clear();
      return status;
    }
    members_.push_back(member);
    num_decoded_ += member.num_tokens == 1 ? 1 : 0;
  }
  return absl::OkStatus();
}

absl::Status GpuBatch::Impl::Prepare(GpuStream stream) {
  enqueued_.assign(geometry().num_layers, false);
  CRUMB_RETURN_IF_ERROR(DemoteOverdue(stream));
  if (is_replayed_) {
    for (const Member& member : members_) {
      CRUMB_RETURN_IF_ERROR(
          member.sequence->impl().DelayUntilLayer(geometry().num_layers - 1, stream));
    }
  }
  FillTables();
  for (const StepTables::Range& range : tables_->Finish()) {
    CRUMB_RETURN_IF_ERROR(CopyToGpu(device_->data() + range.offset,
                                    {host_->data() + range.offset, range.bytes}, stream));
  }
  return copied_->Record(stream);
}

// Pages that an adopted prefix has in BF16 alone, before what is in history is read.
absl::Status GpuBatch::Impl::DemoteOverdue(GpuStream stream) {
  demotions_.clear();
  for (const Member& member : members_) {
    GpuSequence::Impl& sequence = member.sequence->impl();
    const std::span<const GpuPageTable::Demotion> overdue = sequence.pages().overdue();
    if (!overdue.empty()) {
      CRUMB_RETURN_IF_ERROR(sequence.DelayUntilLayer(geometry().num_layers - 1, stream));
      demotions_.insert(demotions_.end(), overdue.begin(), overdue.end());
    }
  }
  CRUMB_RETURN_IF_ERROR(pool_.demoter().Enqueue(demotions_, stream));
  for (const Member& member : members_) {
    member.sequence->impl().step_pages().CommitOverdue();
  }
  return absl::OkStatus();
}

bool GpuBatch::Impl::MembersSharePrefix() const {
  const GpuSequence::Impl& first = members_[0].sequence->impl();
  return members_.size() > 1 && num_decoded_ == members_.size() &&
         !first.adopted_history().empty() &&
         std::all_of(members_.begin(), members_.end(), [&](const Member& member) {
           return member.sequence->impl().SharesPrefixWith(first);
         });
}

void GpuBatch::Impl::FillTables() {
  const std::span<const std::byte* const> prefix =
      shares_prefix_ ? members_[0].sequence->impl().adopted_history()
                     : std::span<const std::byte* const>();
  tables_->Begin(prefix);
  num_windows_.clear();
  history_tokens_ = 0;
  for (const Member& member : members_) {
    const GpuSequence::Impl& sequence = member.sequence->impl();
    const GpuPageTable& pages = sequence.pages();
    pages.CollectWindows(&windows_);
    tables_->Add({.sequence_id = sequence.id(),
                  .length = sequence.length(),
                  .num_tokens = member.num_tokens,
                  .num_pages = pages.num_pages(),
                  .adopted_history = sequence.adopted_history(),
                  .own_history = sequence.own_history(),
                  .windows = windows_});
    num_windows_.push_back(static_cast<uint32_t>(windows_.size()));
    history_tokens_ += member.num_tokens == 1 ? pages.history().size() * kPageTokens : 0;
  }
}

absl::Status GpuBatch::Impl::EndStep(GpuStream stream) {
  if (!is_open_) {
    return absl::FailedPreconditionError("EndStep with no step open; call BeginStep first");
  }
  const auto missing = std::find(enqueued_.begin(), enqueued_.end(), false);
  if (!is_replayed_ && missing != enqueued_.end()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "layer ", missing - enqueued_.begin(), " of ", enqueued_.size(),
        " was not enqueued; a step ends after every layer, or is begun with replayed_rows"));
  }
  const ScopedGpu current(gpu());
  CRUMB_RETURN_IF_ERROR(current.status());
  CRUMB_RETURN_IF_ERROR(CheckStream(stream));
  demotions_.clear();
  for (const Member& member : members_) {
    const auto due = member.sequence->impl().pages().due();
    demotions_.insert(demotions_.end(), due.begin(), due.end());
  }
  CRUMB_RETURN_IF_ERROR(pool_.demoter().Enqueue(demotions_, stream));
  for (const Member& member : members_) {
    member.sequence->impl().EndStep();
  }
  is_open_ = false;
  return absl::OkStatus();
}

void GpuBatch::Impl::AbandonStep() {
  if (is_open_) {
    for (const Member& member : members_) {
      member.sequence->impl().AbandonStep();
    }
    is_open_ = false;
  }
}

absl::Status GpuBatch::Impl::Validate() const {
  for (size_t i = 0; i < members_.size(); ++i) {
    const GpuSequence::Impl& sequence = members_[i].sequence->impl();
    const bool is_known = std::any_of(
        members_.begin(), members_.begin() + static_cast<ptrdiff_t>(i),
        [&](const Member& other) { return other.sequence->impl().SharesPrefixWith(sequence); });
    CRUMB_RETURN_IF_ERROR(OfMember(i, is_known ? sequence.ValidatePages() : sequence.Validate()));
  }
  return absl::OkStatus();
}

}  // namespace crumb
