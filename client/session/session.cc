// SPDX-License-Identifier: Apache-2.0
#include "client/session/session.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace crumb {

Session::Session(std::shared_ptr<ControlPlane> control,  // shared: see the header.
                 AttachedSession attached,
                 DataPlanes planes,
                 const Clock& clock)
    : control_(std::move(control)),
      attached_(std::move(attached)),
      planes_(std::move(planes)),
      clock_(clock) {}

std::string Session::Name() const {
  return absl::StrCat("session ", info().id.value(), " of daemon epoch ", info().epoch);
}

absl::Status Session::status() const {
  absl::MutexLock lock(&mutex_);
  if (end_reason_.ok()) {
    return absl::OkStatus();
  }
  const uint64_t next_epoch = next_epoch_.load(std::memory_order_relaxed);
  return absl::FailedPreconditionError(
      absl::StrCat(Name(), " is over (", end_reason_.message(), "), and its leases with it; ",
                   next_epoch == 0 ? "not attached again yet"
                                   : absl::StrCat("attached anew to daemon epoch ", next_epoch),
                   ": look the prefix up again"));
}

void Session::End(const absl::Status& reason) {
  absl::MutexLock lock(&mutex_);
  if (end_reason_.ok()) {
    end_reason_ = reason;
  }
}

void Session::AddLease(LeaseId lease, absl::Time until) {
  absl::MutexLock lock(&mutex_);
  leases_[lease] = until;
}

absl::Status Session::CheckLease(LeaseId lease) const {
  if (absl::Status ended = status(); !ended.ok()) {
    return ended;
  }
  const absl::Time now = clock_.Now();
  absl::MutexLock lock(&mutex_);
  const auto found = leases_.find(lease);
  if (found == leases_.end()) {
    return absl::FailedPreconditionError(absl::StrCat("lease ", lease.value(), " of ", Name(),
                                                      " was ended by the daemon; look the prefix "
                                                      "up again"));
  }
  if (now >= found->second) {
    return absl::FailedPreconditionError(
        absl::StrCat("lease ", lease.value(), " of ", Name(), " ran out ",
                     absl::FormatDuration(now - found->second), " ago: it was not renewed within ",
                     absl::FormatDuration(lease_time()),
                     "; was this process or the daemon stopped? Look the "
                     "prefix up again"));
  }
  return absl::OkStatus();
}

void Session::ReleaseLease(LeaseId lease) {
  absl::MutexLock lock(&mutex_);
  if (leases_.erase(lease) != 0 && end_reason_.ok()) {
    released_.push_back(lease);
  }
}

Session::Work Session::WaitForWork(absl::Time wake) {
  const auto has_work = [this] {
    mutex_.AssertReaderHeld();
    return !released_.empty() || !end_reason_.ok();
  };
  absl::MutexLock lock(&mutex_);
  mutex_.AwaitWithTimeout(absl::Condition(&has_work), wake - clock_.Now());
  Work work{.release = std::exchange(released_, {}), .renew = {}};
  work.renew.reserve(leases_.size());
  for (const auto& [lease, until] : leases_) {
    work.renew.push_back(lease);
  }
  return work;
}

void Session::Renewed(const std::vector<LeaseId>& renewed,
                      const RenewedLeases& reply,
                      absl::Time sent_at) {
  absl::MutexLock lock(&mutex_);
  for (const LeaseId lease : renewed) {
    if (const auto found = leases_.find(lease); found != leases_.end()) {
      found->second = std::max(found->second, sent_at + reply.lease_for);
    }
  }
  for (const LeaseId lease : reply.ended) {
    leases_.erase(lease);
  }
}

}  // namespace crumb
