// SPDX-License-Identifier: Apache-2.0
#include "daemon/store/page_store.h"

#include <utility>

#include "absl/strings/str_cat.h"

#include "daemon/store/store_core.h"
#include "proto/base/check.h"
#include "proto/base/status_macros.h"

namespace crumb {
namespace {

absl::Status CheckPositive(absl::string_view name, absl::Duration value) {
  return value > absl::ZeroDuration()
             ? absl::OkStatus()
             : absl::InvalidArgumentError(absl::StrCat(name, " is ", absl::FormatDuration(value),
                                                       "; it must be more than 0"));
}

absl::Status CheckOptions(const StoreOptions& options) {
  if (options.capacity_bytes < kChunkAlignment || options.chunk_bytes < kChunkAlignment) {
    return absl::InvalidArgumentError(absl::StrCat("capacity_bytes is ", options.capacity_bytes,
                                                   ", chunk_bytes is ", options.chunk_bytes,
                                                   "; each must be at least ", kChunkAlignment));
  }
  CRUMB_RETURN_IF_ERROR(CheckPositive("lease", options.lease));
  if (options.lease_grace < absl::ZeroDuration() || options.quarantine < absl::ZeroDuration()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "lease_grace is ", absl::FormatDuration(options.lease_grace), ", quarantine is ",
        absl::FormatDuration(options.quarantine), "; neither may be negative"));
  }
  for (const auto& [name, value] :
       {std::pair{"max_sessions", options.max_sessions},
        std::pair{"max_leases_per_session", options.max_leases_per_session},
        std::pair{"max_publishes_per_session", options.max_publishes_per_session},
        std::pair{"max_namespaces", options.max_namespaces},
        std::pair{"max_tokens", options.max_tokens}}) {
    if (value == 0) {
      return absl::InvalidArgumentError(absl::StrCat(name, " is 0; it must be at least 1"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

// The lock, with what is due done first, and closed chunks destroyed after it is given up: to unmap
// a used chunk takes milliseconds.
class ABSL_SCOPED_LOCKABLE PageStore::Access {
 public:
  Access(PageStore* store, absl::Time now) ABSL_EXCLUSIVE_LOCK_FUNCTION(store->mutex_)
      : store_(store) {
    store_->mutex_.Lock();
    store_->core_->Tick(now);
  }
  ~Access() ABSL_UNLOCK_FUNCTION() {
    const auto closed = store_->core_->TakeClosedChunks();
    store_->mutex_.Unlock();
  }
  Access(const Access&) = delete;
  Access& operator=(const Access&) = delete;

 private:
  PageStore* const store_;
};

absl::StatusOr<std::unique_ptr<PageStore>> PageStore::Create(const StoreOptions& options,
                                                             const Clock& clock,
                                                             const CopyTier* tier) {
  CRUMB_RETURN_IF_ERROR(CheckOptions(options));
  return std::unique_ptr<PageStore>(new PageStore(options, clock, tier));
}

PageStore::PageStore(const StoreOptions& options, const Clock& clock, const CopyTier* tier)
    : options_(options),
      clock_(clock),
      core_(std::make_unique<store_internal::StoreCore>(options, tier)) {}

PageStore::~PageStore() = default;

absl::StatusOr<SessionId> PageStore::OpenSession(const SessionSpec& spec) {
  const absl::Time now = clock_.Now();
  Access lock(this, now);
  return core_->OpenSession(spec, now);
}

void PageStore::EndSession(SessionId session) {
  const absl::Time now = clock_.Now();
  Access lock(this, now);
  core_->EndSession(session, now);
}

absl::StatusOr<LookupResult> PageStore::Lookup(SessionId session,
                                               std::string_view context_key,
                                               std::span<const uint32_t> tokens,
                                               bool allow_int2_window) {
  const absl::Time now = clock_.Now();
  Access lock(this, now);
  return core_->Lookup(session, context_key, tokens, allow_int2_window, now);
}

absl::StatusOr<PrefixLength> PageStore::Probe(SessionId session,
                                              std::string_view context_key,
                                              std::span<const uint32_t> tokens) const {
  absl::MutexLock lock(&mutex_);
  return std::as_const(*core_).Probe(session, context_key, tokens);
}

absl::StatusOr<PrefixLength> PageStore::Probe(const NamespaceId& namespace_id,
                                              std::span<const uint32_t> tokens) const {
  absl::MutexLock lock(&mutex_);
  return std::as_const(*core_).Probe(namespace_id, tokens);
}

absl::StatusOr<PublishPlan> PageStore::BeginPublish(SessionId session,
                                                    std::string_view context_key,
                                                    std::span<const uint32_t> tokens) {
  const absl::Time now = clock_.Now();
  Access lock(this, now);
  return core_->BeginPublish(session, context_key, tokens, now);
}

absl::StatusOr<WriteGuard> PageStore::BeginWrite(SessionId session,
                                                 PublishId publish,
                                                 std::span<const PageIdx> pages) {
  Access lock(this, clock_.Now());
  CRUMB_ASSIGN_OR_RETURN(store_internal::WriteHold hold,
                         core_->BeginWrite(session, publish, pages));
  hold.store = this;
  WriteGuard guard;
  guard.hold_ = std::make_unique<store_internal::WriteHold>(std::move(hold));
  return guard;
}

absl::Status PageStore::KeepWritten(SessionId session,
                                    PublishId publish,
                                    std::vector<WrittenBlock> written) {
  Access lock(this, clock_.Now());
  return core_->KeepWritten(session, publish, std::move(written));
}

absl::StatusOr<CommitResult> PageStore::CommitPublish(SessionId session,
                                                      PublishId publish,
                                                      std::span<const WrittenBlock> written) {
  const absl::Time now = clock_.Now();
  Access lock(this, now);
  return core_->CommitPublish(session, publish, written, now);
}

absl::Status PageStore::AbortPublish(SessionId session, PublishId publish) {
  Access lock(this, clock_.Now());
  return core_->AbortPublish(session, publish);
}

absl::StatusOr<std::vector<LeaseId>> PageStore::RenewLeases(SessionId session,
                                                            std::span<const LeaseId> leases) {
  const absl::Time now = clock_.Now();
  Access lock(this, now);
  return core_->RenewLeases(session, leases, now);
}

absl::Status PageStore::ReleaseLeases(SessionId session, std::span<const LeaseId> leases) {
  Access lock(this, clock_.Now());
  return core_->ReleaseLeases(session, leases);
}

absl::StatusOr<ReadGuard> PageStore::BeginRead(SessionId session,
                                               LeaseId lease,
                                               std::span<const PageKey> keys) {
  Access lock(this, clock_.Now());
  CRUMB_ASSIGN_OR_RETURN(store_internal::ReadHold hold, core_->BeginRead(session, lease, keys));
  hold.store = this;
  ReadGuard guard;
  guard.hold_ = std::make_unique<store_internal::ReadHold>(std::move(hold));
  return guard;
}

absl::StatusOr<ChunkFd> PageStore::GetChunk(SessionId session, ChunkId chunk) const {
  absl::MutexLock lock(&mutex_);
  return std::as_const(*core_).GetChunk(session, chunk);
}

absl::StatusOr<CopyChunkFds> PageStore::GetCopyChunk(SessionId session, ChunkId chunk) const {
  absl::MutexLock lock(&mutex_);
  return std::as_const(*core_).GetCopyChunk(session, chunk);
}

absl::StatusOr<std::vector<ChunkName>> PageStore::ListChunks(SessionId session,
                                                             bool of_copies,
                                                             ChunkId below,
                                                             size_t max) const {
  absl::MutexLock lock(&mutex_);
  return std::as_const(*core_).ListChunks(session, of_copies, below, max);
}

bool PageStore::AwaitCopyWork() {
  absl::MutexLock lock(&mutex_);
  const auto has_work = [this] {
    mutex_.AssertReaderHeld();
    return core_->HasCopyWork();
  };
  mutex_.Await(absl::Condition(&has_work));
  return !core_->stopped_copying();
}

// shared: with the chunk.
std::shared_ptr<ChunkMemory> PageStore::AwaitNewChunk() {
  absl::MutexLock lock(&mutex_);
  const auto has_new_chunk = [this] {
    mutex_.AssertReaderHeld();
    return core_->HasNewChunk();
  };
  for (;;) {
    mutex_.Await(absl::Condition(&has_new_chunk));
    if (core_->stopped_copying()) {
      return nullptr;
    }
    // Those that were closed again are passed over.
    if (std::shared_ptr<ChunkMemory> memory = core_->TakeNewChunk(); memory != nullptr) {
      return memory;
    }
  }
}

void PageStore::StopCopies() {
  absl::MutexLock lock(&mutex_);
  core_->StopCopies();
}

CopyBatch PageStore::BeginCopies(size_t max_bytes) {
  Access lock(this, clock_.Now());
  store_internal::CopyHold hold = core_->BeginCopies(max_bytes);
  CopyBatch batch;
  if (!hold.items.empty()) {
    hold.store = this;
    batch.hold_ = std::make_unique<store_internal::CopyHold>(std::move(hold));
  }
  return batch;
}

void PageStore::EndCopies(const store_internal::CopyHold& hold) {
  Access lock(this, clock_.Now());
  core_->EndCopies(hold);
}

std::vector<uint32_t> PageStore::TakeSpentSegments() {
  absl::MutexLock lock(&mutex_);
  return core_->TakeSpentSegments();
}

void PageStore::ReturnSegment(uint32_t segment) {
  absl::MutexLock lock(&mutex_);
  core_->ReturnSegment(segment);
}

void PageStore::Tick() {
  Access lock(this, clock_.Now());
}

absl::StatusOr<EvictResult> PageStore::Evict(const NamespaceId& namespace_id,
                                             std::span<const uint32_t> tokens) {
  Access lock(this, clock_.Now());
  return core_->Evict(namespace_id, tokens);
}

void PageStore::SetDraining() {
  absl::MutexLock lock(&mutex_);
  core_->SetDraining();
}

StoreStatus PageStore::Status() const {
  const absl::Time now = clock_.Now();
  absl::MutexLock lock(&mutex_);
  return core_->Status(now);
}

absl::StatusOr<TreeStatus> PageStore::Tree(std::optional<NamespaceId> namespace_id,
                                           uint32_t max_nodes) const {
  const absl::Time now = clock_.Now();
  absl::MutexLock lock(&mutex_);
  return core_->Tree(namespace_id, max_nodes, now);
}

absl::Status PageStore::CheckInvariants() const {
  absl::MutexLock lock(&mutex_);
  return core_->CheckInvariants();
}

void PageStore::EndRead(const store_internal::ReadHold& hold) {
  Access lock(this, clock_.Now());
  core_->EndRead(hold);
}

void PageStore::EndWrite(const store_internal::WriteHold& hold) {
  Access lock(this, clock_.Now());
  core_->EndWrite(hold);
}

std::optional<CopyPlace> PageStore::ReserveCopy(const store_internal::WriteHold& hold,
                                                size_t index) {
  Access lock(this, clock_.Now());
  return core_->ReserveCopy(hold, index);
}

ReadGuard::ReadGuard() = default;
ReadGuard::ReadGuard(ReadGuard&& other) noexcept = default;
ReadGuard::~ReadGuard() {
  if (hold_ != nullptr) {
    hold_->store->EndRead(*hold_);
  }
}
ReadGuard& ReadGuard::operator=(ReadGuard&& other) noexcept {
  std::swap(hold_, other.hold_);
  return *this;
}
std::span<const PinnedPage> ReadGuard::pages() const {
  return hold_ == nullptr ? std::span<const PinnedPage>() : hold_->pages;
}

WriteGuard::WriteGuard() = default;
WriteGuard::WriteGuard(WriteGuard&& other) noexcept = default;
WriteGuard::~WriteGuard() {
  if (hold_ != nullptr) {
    hold_->store->EndWrite(*hold_);
  }
}
WriteGuard& WriteGuard::operator=(WriteGuard&& other) noexcept {
  std::swap(hold_, other.hold_);
  return *this;
}
std::span<const WritableBlock> WriteGuard::blocks() const {
  return hold_ == nullptr ? std::span<const WritableBlock>() : hold_->blocks;
}

std::optional<CopyPlace> WriteGuard::ReserveCopy(const WritableBlock& block) const {
  CRUMB_CHECK(
      &block >= hold_->blocks.data() && &block < hold_->blocks.data() + hold_->blocks.size(),
      "a block of this guard");
  return hold_->store->ReserveCopy(*hold_, static_cast<size_t>(&block - hold_->blocks.data()));
}

CopyBatch::CopyBatch() = default;
CopyBatch::CopyBatch(CopyBatch&& other) noexcept = default;
CopyBatch::~CopyBatch() {
  if (hold_ != nullptr) {
    hold_->store->EndCopies(*hold_);
  }
}
CopyBatch& CopyBatch::operator=(CopyBatch&& other) noexcept {
  std::swap(hold_, other.hold_);
  return *this;
}
std::span<const PageCopy> CopyBatch::copies() const {
  return hold_ == nullptr ? std::span<const PageCopy>() : hold_->copies;
}
void CopyBatch::SetArrived(size_t index) {
  hold_->items[index].arrived = true;
}

}  // namespace crumb
