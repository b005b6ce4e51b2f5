// SPDX-License-Identifier: Apache-2.0
#include "daemon/transfer/session_table.h"

#include <sys/random.h>
#include <sys/types.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"

#include "proto/base/check.h"

// shared: the header says by whom.

namespace crumb {
namespace {

bool EqualInConstantTime(const SessionSecret& a, const SessionSecret& b) {
  unsigned difference = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference |= static_cast<unsigned>(a[i] ^ b[i]);
  }
  return difference == 0;
}

absl::Status NoSuchSession(SessionId session) {
  return absl::FailedPreconditionError(absl::StrCat(
      "session ", session.value(), " is not attached (it ended, or is of another daemon): attach"));
}

}  // namespace

SessionSecret MakeSessionSecret() {
  SessionSecret secret;
  ssize_t taken = -1;
  do {
    taken = getrandom(secret.data(), secret.size(), 0);
  } while (taken < 0 && errno == EINTR);
  CRUMB_CHECK(taken == static_cast<ssize_t>(secret.size()), "getrandom gives 16 bytes or fails");
  return secret;
}

void SessionTable::Add(SessionId session, const SessionSecret& secret) {
  absl::MutexLock lock(&mutex_);
  const bool is_new = entries_.emplace(session, Entry{secret, nullptr}).second;
  CRUMB_CHECK(is_new, "session ids are never used twice");
}

void SessionTable::Remove(SessionId session) {
  std::shared_ptr<const StagingMemory> staging;  // Unmapped after the lock.
  absl::MutexLock lock(&mutex_);
  if (const auto entry = entries_.find(session); entry != entries_.end()) {
    staging = std::move(entry->second.staging);
    entries_.erase(entry);
  }
}

absl::Status SessionTable::Authenticate(SessionId session, const SessionSecret& secret) const {
  absl::MutexLock lock(&mutex_);
  const auto entry = entries_.find(session);
  if (entry == entries_.end()) {
    return NoSuchSession(session);
  }
  if (!EqualInConstantTime(entry->second.secret, secret)) {
    wrong_secrets_.fetch_add(1, std::memory_order_relaxed);
    return absl::UnauthenticatedError(
        absl::StrCat("wrong secret for session ", session.value(), ": use the one of AttachReply"));
  }
  return absl::OkStatus();
}

absl::Status SessionTable::SetStaging(SessionId session,
                                      std::shared_ptr<const StagingMemory> staging) {
  absl::MutexLock lock(&mutex_);
  const auto entry = entries_.find(session);
  if (entry == entries_.end()) {
    return NoSuchSession(session);
  }
  // The earlier one leaves by the argument, so that it is unmapped after the lock.
  entry->second.staging.swap(staging);
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const StagingMemory>> SessionTable::Staging(
    SessionId session) const {
  absl::MutexLock lock(&mutex_);
  const auto entry = entries_.find(session);
  if (entry == entries_.end()) {
    return NoSuchSession(session);
  }
  if (entry->second.staging == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("session ", session.value(),
                     " has given no staging memory: send it over the memory socket first"));
  }
  return entry->second.staging;
}

}  // namespace crumb
