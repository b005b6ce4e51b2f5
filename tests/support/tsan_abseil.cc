// SPDX-License-Identifier: Apache-2.0
//
// What the thread sanitizer must be told, linked into every program of a tsan build.
//
// The distribution's Abseil is built without the sanitizer, so by itself the sanitizer does not see
// absl::Mutex order anything and reports every field that one guards. The functions below take the
// place of Abseil's of the same names, for all libraries of the process, tell the sanitizer what
// happens and call the original, which the dynamic linker finds behind them. Between the pre_ and
// the post_ calls the sanitizer looks at nothing, which covers conditions that one thread evaluates
// on behalf of another. Thread-safe.
//
// Not covered: Await under a reader's lock (reported, never hidden) and Notification::
// HasBeenNotified, whose fast path is inline.
#include <dlfcn.h>
#include <sanitizer/tsan_interface.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "absl/base/options.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"

#define CRUMB_TSAN_STRING_OF(x) #x
#define CRUMB_TSAN_STRING(x) CRUMB_TSAN_STRING_OF(x)

// The options and suppressions of every program of the build, so that one run by hand judges as
// CTest does. TSAN_OPTIONS adds to them.
extern "C" const char* __tsan_default_options() {  // NOLINT: the sanitizer's name.
  return "halt_on_error=1:second_deadlock_stack=1";
}

namespace {

// The next definition of `member`, an Itanium-mangled name within absl's inline namespace.
template <typename Function>
Function* Original(const char* member, const char* qualifier = "") {
  static_assert(ABSL_OPTION_USE_INLINE_NAMESPACE == 1, "the mangled names below assume it");
  const std::string space = CRUMB_TSAN_STRING(ABSL_OPTION_INLINE_NAMESPACE_NAME);
  const std::string name =
      std::string("_ZN") + qualifier + "4absl" + std::to_string(space.size()) + space + member;
  void* const found = dlsym(RTLD_NEXT, name.c_str());
  if (found == nullptr) {
    std::fprintf(stderr, "no %s in the shared libraries; tsan builds need Abseil as one\n",
                 name.c_str());
    std::abort();
  }
  return reinterpret_cast<Function*>(found);
}

// True while this thread is within an original, whose calls of its own functions are its own
// affair.
thread_local bool within_original = false;

class Within {
 public:
  Within() { within_original = true; }
  ~Within() { within_original = false; }
  Within(const Within&) = delete;
  Within& operator=(const Within&) = delete;
};

template <typename Call>
auto Locking(absl::Mutex* mutex, unsigned flags, Call call) {
  if (within_original) {
    return call();
  }
  struct Told {
    absl::Mutex* mutex;
    unsigned flags;
    Told(absl::Mutex* m, unsigned f) : mutex(m), flags(f) { __tsan_mutex_pre_lock(mutex, flags); }
    ~Told() { __tsan_mutex_post_lock(mutex, flags, 0); }
  } const told(mutex, flags);
  const Within within;
  return call();
}

template <typename Call>
bool TryLocking(absl::Mutex* mutex, unsigned flags, Call call) {
  if (within_original) {
    return call();
  }
  flags |= __tsan_mutex_try_lock;
  __tsan_mutex_pre_lock(mutex, flags);
  bool locked = false;
  {
    const Within within;
    locked = call();
  }
  __tsan_mutex_post_lock(mutex, locked ? flags : flags | __tsan_mutex_try_lock_failed, 0);
  return locked;
}

template <typename Call>
void Unlocking(absl::Mutex* mutex, unsigned flags, Call call) {
  if (within_original) {
    call();
    return;
  }
  __tsan_mutex_pre_unlock(mutex, flags);
  {
    const Within within;
    call();
  }
  __tsan_mutex_post_unlock(mutex, flags);  // Only ends the blindness: the mutex may be gone.
}

// A wait gives up the mutex, held for writing, and takes it again.
template <typename Call>
auto Waiting(absl::Mutex* mutex, Call call) {
  if (!within_original) {
    __tsan_mutex_pre_unlock(mutex, 0);
    __tsan_mutex_post_unlock(mutex, 0);
  }
  return Locking(mutex, 0, call);
}

}  // namespace

namespace absl {
ABSL_NAMESPACE_BEGIN

Mutex::~Mutex() {
  static auto* const original = Original<void(Mutex*)>("5MutexD1Ev");
  __tsan_mutex_destroy(this, 0);
  original(this);
}

void Mutex::Lock() {
  static auto* const original = Original<void(Mutex*)>("5Mutex4LockEv");
  Locking(this, 0, [&] { original(this); });
}

bool Mutex::TryLock() {
  static auto* const original = Original<bool(Mutex*)>("5Mutex7TryLockEv");
  return TryLocking(this, 0, [&] { return original(this); });
}

void Mutex::Unlock() {
  static auto* const original = Original<void(Mutex*)>("5Mutex6UnlockEv");
  Unlocking(this, 0, [&] { original(this); });
}

void Mutex::ReaderLock() {
  static auto* const original = Original<void(Mutex*)>("5Mutex10ReaderLockEv");
  Locking(this, __tsan_mutex_read_lock, [&] { original(this); });
}

bool Mutex::ReaderTryLock() {
  static auto* const original = Original<bool(Mutex*)>("5Mutex13ReaderTryLockEv");
  return TryLocking(this, __tsan_mutex_read_lock, [&] { return original(this); });
}

void Mutex::ReaderUnlock() {
  static auto* const original = Original<void(Mutex*)>("5Mutex12ReaderUnlockEv");
  Unlocking(this, __tsan_mutex_read_lock, [&] { original(this); });
}

void Mutex::LockWhen(const Condition& condition) {
  static auto* const original =
      Original<void(Mutex*, const Condition&)>("5Mutex8LockWhenERKNS0_9ConditionE");
  Locking(this, 0, [&] { original(this, condition); });
}

bool Mutex::LockWhenWithTimeout(const Condition& condition, Duration timeout) {
  static auto* const original = Original<bool(Mutex*, const Condition&, Duration)>(
      "5Mutex19LockWhenWithTimeoutERKNS0_9ConditionENS0_8DurationE");
  return Locking(this, 0, [&] { return original(this, condition, timeout); });
}

bool Mutex::LockWhenWithDeadline(const Condition& condition, Time deadline) {
  static auto* const original = Original<bool(Mutex*, const Condition&, Time)>(
      "5Mutex20LockWhenWithDeadlineERKNS0_9ConditionENS0_4TimeE");
  return Locking(this, 0, [&] { return original(this, condition, deadline); });
}

void Mutex::ReaderLockWhen(const Condition& condition) {
  static auto* const original =
      Original<void(Mutex*, const Condition&)>("5Mutex14ReaderLockWhenERKNS0_9ConditionE");
  Locking(this, __tsan_mutex_read_lock, [&] { original(this, condition); });
}

void Mutex::Await(const Condition& condition) {
  static auto* const original =
      Original<void(Mutex*, const Condition&)>("5Mutex5AwaitERKNS0_9ConditionE");
  Waiting(this, [&] { original(this, condition); });
}

bool Mutex::AwaitWithTimeout(const Condition& condition, Duration timeout) {
  static auto* const original = Original<bool(Mutex*, const Condition&, Duration)>(
      "5Mutex16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE");
  return Waiting(this, [&] { return original(this, condition, timeout); });
}

bool Mutex::AwaitWithDeadline(const Condition& condition, Time deadline) {
  static auto* const original = Original<bool(Mutex*, const Condition&, Time)>(
      "5Mutex17AwaitWithDeadlineERKNS0_9ConditionENS0_4TimeE");
  return Waiting(this, [&] { return original(this, condition, deadline); });
}

void CondVar::Wait(Mutex* mutex) {
  static auto* const original = Original<void(CondVar*, Mutex*)>("7CondVar4WaitEPNS0_5MutexE");
  Waiting(mutex, [&] { original(this, mutex); });
}

bool CondVar::WaitWithTimeout(Mutex* mutex, Duration timeout) {
  static auto* const original = Original<bool(CondVar*, Mutex*, Duration)>(
      "7CondVar15WaitWithTimeoutEPNS0_5MutexENS0_8DurationE");
  return Waiting(mutex, [&] { return original(this, mutex, timeout); });
}

bool CondVar::WaitWithDeadline(Mutex* mutex, Time deadline) {
  static auto* const original =
      Original<bool(CondVar*, Mutex*, Time)>("7CondVar16WaitWithDeadlineEPNS0_5MutexENS0_4TimeE");
  return Waiting(mutex, [&] { return original(this, mutex, deadline); });
}

void Notification::Notify() {
  static auto* const original = Original<void(Notification*)>("12Notification6NotifyEv");
  __tsan_release(this);
  original(this);
}

void Notification::WaitForNotification() const {
  static auto* const original =
      Original<void(const Notification*)>("12Notification19WaitForNotificationEv", "K");
  original(this);
  __tsan_acquire(const_cast<Notification*>(this));
}

bool Notification::WaitForNotificationWithTimeout(Duration timeout) const {
  static auto* const original = Original<bool(const Notification*, Duration)>(
      "12Notification30WaitForNotificationWithTimeoutENS0_8DurationE", "K");
  const bool notified = original(this, timeout);
  if (notified) {
    __tsan_acquire(const_cast<Notification*>(this));
  }
  return notified;
}

bool Notification::WaitForNotificationWithDeadline(Time deadline) const {
  static auto* const original = Original<bool(const Notification*, Time)>(
      "12Notification31WaitForNotificationWithDeadlineENS0_4TimeE", "K");
  const bool notified = original(this, deadline);
  if (notified) {
    __tsan_acquire(const_cast<Notification*>(this));
  }
  return notified;
}

// The count of a shared status's users goes down in the library: what each did with it happens
// before the last one's delete.
void Status::UnrefNonInlined(uintptr_t rep) {
  static auto* const original = Original<void(uintptr_t)>("6Status15UnrefNonInlinedEm");
  void* const shared = reinterpret_cast<void*>(rep & ~uintptr_t{3});
  __tsan_release(shared);
  __tsan_acquire(shared);
  original(rep);
}

ABSL_NAMESPACE_END
}  // namespace absl
