// SPDX-License-Identifier: Apache-2.0
//
// A page store and its naive twin (store_twin.h) under the same random operations. Each step checks
// what the store answers against the twin: what is found, its bytes, what a publish lacks, what was
// evicted and who held it. gtest's fatal failures say what differed.
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "daemon/store/page_store.h"
#include "tests/model/store_twin.h"
#include "tests/support/fake_clock.h"
#include "tests/support/fake_copy_tier.h"
#include "tests/support/store_testing.h"

namespace crumb {

struct ModelSession {
  SessionId id;
  std::string tenant;
  HeadRange heads;
};
struct ModelLease {
  LeaseId id;
  SessionId session;
  HeadRange heads;
  std::string prefix;  // Exactly its pages.
  std::vector<PageRef> pages;
  absl::Time end;
  bool in_quarantine = false;
};
struct ModelPublish {
  PublishId id;
  SessionId session;
  HeadRange heads;
  std::string prefix;
  std::vector<TwinItem> items;
  bool is_over = false;  // With a guard that outlived it.
  std::optional<WriteGuard> guard;
  size_t num_kept = 0;  // Of the first items, which the commit need not name.
  std::vector<WrittenBlock> written;
};
struct ModelRead {
  ReadGuard guard;
  std::string prefix;
  HeadRange heads;
};

class StoreModel {
 public:
  // On a store of so many bytes, with a tier of copies beside it of so many segments of 144 KiB; 0:
  // none. Equal seeds, equal operations.
  StoreModel(uint64_t seed,
             size_t capacity_bytes,
             TwinFault fault = TwinFault::kNone,
             uint32_t num_segments = 0);

  // One random operation.
  void Step();
  // What must hold after any of them.
  void Check();
  // Ends whatever holds anything, and checks that nothing is held.
  void EndAll();
  StoreCounters counters() const { return store_->Status().counters; }
  uint64_t verified_copies() const { return verified_copies_; }

 private:
  int Uniform(int n) { return std::uniform_int_distribution<int>(0, n - 1)(random_); }
  std::string RandomLetters();
  std::string RandomKey() { return Uniform(3) == 0 ? "k" : ""; }
  template <typename T>
  typename T::iterator Pick(T& all) {
    return std::next(all.begin(), Uniform(static_cast<int>(all.size())));
  }
  const ModelSession* Find(SessionId id) const {
    const auto place = sessions_.find(id);
    return place == sessions_.end() ? nullptr : &place->second;
  }
  static std::string Join(const std::string& tenant, const std::string& key, const std::string& s) {
    return absl::StrCat(tenant, key, "|", s);
  }
  static std::string Salt(const std::string& prefix) { return prefix.substr(0, prefix.find('|')); }
  static std::vector<uint32_t> Tokens(const std::string& prefix) {
    return PagesOf(std::string_view(prefix).substr(prefix.find('|') + 1));
  }

  void OpenSession();
  void EndSession();
  void Tick();
  void Lookup();
  // All bytes that a lease gives are what was published, where the lookup said they are.
  void VerifyLease(const ModelLease& lease);
  // The same of its copies, by their descriptors, for as long as the lease or its quarantine.
  void VerifyCopies(const ModelLease& lease);
  void VerifyCopy(const ModelLease& lease, const BlockRef& ref, PageKey key);
  // All that waits to be copied; some of it fails.
  void CopyAll();
  void BeginOrEndRead();
  void Begin();
  void CheckRefusal(const std::string& prefix, const StoreStatus& before, const StoreStatus& after);
  // Finds out what went, by what is not found any more; whatever is held must still be there.
  void NoteEvictions(const StoreStatus& before, const StoreStatus& after);
  void WriteOrCommit();
  void KeepSome(ModelPublish* publish);
  void Commit(ModelPublish* publish);
  void Abort();
  // What a guard still writes stays claimed until it is closed.
  void EndPublish(ModelPublish* publish);
  void CloseGuard(ModelPublish* publish);
  void Renew();
  void Release();
  void Evict();

  std::mt19937_64 random_;
  FakeClock clock_;
  std::unique_ptr<FakeCopyTier> tier_;  // Null: none.
  std::vector<uint32_t> unready_segments_;
  uint64_t verified_copies_ = 0;
  std::unique_ptr<PageStore> store_;
  StoreTwin twin_;
  // Sessions that last, one a tenant and range of heads: by their probes it is seen what is there.
  std::vector<ModelSession> watchers_;
  std::map<SessionId, ModelSession> sessions_;
  std::vector<ModelLease> leases_;
  std::list<ModelPublish> publishes_;  // Their guards, and those of reads, go before the store.
  std::list<ModelRead> reads_;
};

}  // namespace crumb
