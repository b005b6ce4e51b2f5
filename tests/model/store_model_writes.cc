// SPDX-License-Identifier: Apache-2.0
//
// StoreModel: publishes and evictions.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <utility>

#include "proto/page/chunk_layout.h"
#include "proto/page/namespace_id.h"
#include "tests/model/store_model.h"

namespace crumb {
namespace {

const Geometry kGeometry = SmallPageProfile().geometry;

}  // namespace

void StoreModel::Begin() {
  const ModelSession& session = Pick(sessions_)->second;
  const std::string key = RandomKey();
  const std::string prefix = Join(session.tenant, key, RandomLetters());
  const uint64_t heads = session.heads.Mask();
  const StoreStatus before = store_->Status();
  const auto plan = store_->BeginPublish(session.id, key, Tokens(prefix));
  const StoreStatus after = store_->Status();
  if (absl::IsResourceExhausted(plan.status())) {
    CheckRefusal(prefix, before, after);
    return;
  }
  ModelPublish publish{plan.ok() ? plan->id : PublishId(),
                       session.id,
                       session.heads,
                       prefix,
                       {},
                       false,
                       std::nullopt,
                       0,
                       {}};
  // Held by the publish before anything was evicted.
  ++twin_.pages[prefix].pins;
  bool any_unknown = false;
  bool too_many = false;
  size_t next_missing = 0;
  for (TwinItem& item : StoreTwin::Wanted(prefix)) {
    const TwinPage& page = twin_.pages[item.prefix];
    const bool unknown = item.encoding == 1 && page.copies_unknown;
    any_unknown = any_unknown || unknown;
    const PageKey page_key{PageIdx(StoreTwin::NumPages(item.prefix) - 1),
                           item.encoding == 0 ? PageEncoding::kInt2 : PageEncoding::kBf16};
    const bool missing =
        plan.ok() && next_missing < plan->missing.size() && plan->missing[next_missing] == page_key;
    if (unknown ? !missing : page.Has(item.encoding, heads)) {
      ASSERT_FALSE(missing) << item.prefix;
      continue;
    }
    if (!twin_.Claim(&item, heads)) {
      too_many = true;
      break;
    }
    ASSERT_TRUE(missing || !plan.ok()) << item.prefix << " encoding " << item.encoding;
    ++next_missing;
    publish.items.push_back(item);
  }
  if (!plan.ok()) {
    ASSERT_EQ(absl::StatusCode::kAborted, plan.status().code()) << plan.status();
    ASSERT_TRUE(too_many || any_unknown) << plan.status();
    EndPublish(&publish);
  } else {
    ASSERT_FALSE(too_many);
    ASSERT_EQ(plan->missing.size(), next_missing);
    publishes_.push_back(std::move(publish));
  }
  NoteEvictions(before, after);
}

void StoreModel::CheckRefusal(const std::string& prefix,
                              const StoreStatus& before,
                              const StoreStatus& after) {
  ASSERT_EQ(before.counters.evicted_pages, after.counters.evicted_pages);
  ASSERT_EQ(before.counters.evicted_tail_copies, after.counters.evicted_tail_copies);
  ASSERT_EQ(before.used_bytes, after.used_bytes);
  ASSERT_EQ(before.index_nodes > 0, after.index_nodes > 0);
  size_t need = 2 * kChunkAlignment;  // Header tables.
  for (const TwinItem& item : StoreTwin::Wanted(prefix)) {
    const auto encoding = item.encoding == 0 ? PageEncoding::kInt2 : PageEncoding::kBf16;
    need += ChunkLayout{kGeometry.PageBytes(encoding), 1}.block_stride();
  }
  ASSERT_GT(need, after.capacity_bytes - after.chunk_bytes) << "refused though there was room";
  if (after.leased_pages == 0) {
    ASSERT_GT(need, after.capacity_bytes) << "refused though nothing is held";
  }
}

void StoreModel::WriteOrCommit() {
  if (publishes_.empty()) {
    return;
  }
  const auto publish = Pick(publishes_);
  if (publish->is_over) {
    CloseGuard(&*publish);
    publishes_.erase(publish);
  } else if (publish->written.empty() && !publish->items.empty()) {
    auto guard = store_->BeginWrite(publish->session, publish->id);
    ASSERT_EQ(absl::OkStatus(), guard.status());
    for (const WritableBlock& block : guard->blocks()) {
      publish->written.push_back(WriteBlock(block, Salt(publish->prefix), Tokens(publish->prefix),
                                            publish->heads, kGeometry));
      if (tier_ != nullptr && Uniform(2) == 0) {
        const auto place = guard->ReserveCopy(block);
        publish->written.back().is_copied = place.has_value() && Uniform(4) != 0;
        if (publish->written.back().is_copied) {
          tier_->Put(*place, block.bytes);
        }
      }
    }
    if (Uniform(4) == 0) {
      publish->guard = *std::move(guard);
    } else {
      { const WriteGuard ended = *std::move(guard); }
      KeepSome(&*publish);
    }
  } else {
    Commit(&*publish);
    std::erase_if(publishes_, [](const auto& p) { return p.is_over && !p.guard.has_value(); });
  }
}

// The first few of what was written, so that the commit need not name them.
void StoreModel::KeepSome(ModelPublish* publish) {
  const auto count = static_cast<size_t>(Uniform(static_cast<int>(publish->written.size())));
  const auto end = publish->written.begin() + static_cast<ptrdiff_t>(count);
  const std::vector<WrittenBlock> first(publish->written.begin(), end);
  ASSERT_EQ(absl::OkStatus(), store_->KeepWritten(publish->session, publish->id, first));
  if (!first.empty()) {
    ASSERT_EQ(absl::StatusCode::kInvalidArgument,
              store_->KeepWritten(publish->session, publish->id, first).code());
  }
  publish->num_kept = count;
  publish->written.erase(publish->written.begin(), end);
}

void StoreModel::Commit(ModelPublish* publish) {
  if (publish->guard.has_value()) {
    ASSERT_EQ(
        absl::StatusCode::kFailedPrecondition,
        store_->CommitPublish(publish->session, publish->id, publish->written).status().code());
    publish->guard.reset();
  }
  // Now and then without a copy of the tail, which is fine, or without a page, which is not.
  std::vector<WrittenBlock> written = publish->written;
  std::vector<TwinItem> left_out;
  bool is_whole = true;
  if (!written.empty() && Uniform(4) == 0) {
    const auto victim = Uniform(static_cast<int>(written.size()));
    const TwinItem& item = publish->items[publish->num_kept + static_cast<size_t>(victim)];
    is_whole = item.encoding == 1 && StoreTwin::NumPages(item.prefix) > StoreTwin::kSink;
    left_out.push_back(item);
    written.erase(written.begin() + victim);
  }
  const auto result = store_->CommitPublish(publish->session, publish->id, written);
  if (!is_whole) {
    ASSERT_EQ(absl::StatusCode::kInvalidArgument, result.status().code());
    return;
  }
  ASSERT_EQ(absl::OkStatus(), result.status());
  std::set<std::string> added;
  bool any_unknown = false;
  for (const TwinItem& item : publish->items) {
    any_unknown = any_unknown || twin_.pages.at(item.prefix).copies_unknown;
    if (!left_out.empty() && item.block == left_out[0].block) {
      twin_.Unclaim(item, publish->heads.Mask());
    } else if (twin_.Commit(item, publish->heads.Mask())) {
      added.insert(item.prefix);
    }
  }
  publish->items.clear();
  if (!any_unknown) {
    ASSERT_EQ(added.size(), result->pages_added);
  }
  ASSERT_EQ(StoreTwin::NumPages(publish->prefix), result->pages_added + result->pages_present);
  EndPublish(publish);
}

void StoreModel::Abort() {
  if (publishes_.empty()) {
    return;
  }
  const auto publish = Pick(publishes_);
  const auto status = store_->AbortPublish(publish->session, publish->id);
  if (publish->is_over) {
    ASSERT_FALSE(status.ok());
    return;
  }
  ASSERT_EQ(absl::OkStatus(), status);
  EndPublish(&*publish);
  std::erase_if(publishes_, [](const auto& p) { return p.is_over && !p.guard.has_value(); });
}

void StoreModel::EndPublish(ModelPublish* publish) {
  publish->is_over = true;
  --twin_.pages.at(publish->prefix).pins;
  if (!publish->guard.has_value()) {
    CloseGuard(publish);
  }
}

void StoreModel::CloseGuard(ModelPublish* publish) {
  publish->guard.reset();
  for (const TwinItem& item : publish->items) {
    twin_.Unclaim(item, publish->heads.Mask());
  }
  publish->items.clear();
}

void StoreModel::Evict() {
  const std::string tenant = Uniform(2) == 0 ? "t0" : "t1";
  const std::string key = RandomKey();
  const std::string prefix = Join(tenant, key, Uniform(3) == 0 ? "" : RandomLetters());
  const StoreStatus before = store_->Status();
  const auto result =
      store_->Evict(ComputeNamespaceId(tenant, SmallPageProfile().id, key), Tokens(prefix));
  const StoreStatus after = store_->Status();
  if (!result.ok()) {
    ASSERT_EQ(absl::StatusCode::kNotFound, result.status().code());
    return;
  }
  ASSERT_EQ(result->evicted_pages, after.counters.evicted_pages - before.counters.evicted_pages);
  ASSERT_EQ(result->freed_bytes, before.used_bytes - after.used_bytes);
  NoteEvictions(before, after);
  for (const auto& [other, page] : twin_.pages) {  // Nothing that extends it is left but held.
    if (other.size() > prefix.size() && other.compare(0, prefix.size(), prefix) == 0 &&
        twin_.pages.contains(prefix.back() == '|' ? other : prefix)) {
      ASSERT_TRUE(twin_.IsHeld(other)) << other << " survived the eviction of " << prefix;
    }
  }
}

void StoreModel::NoteEvictions(const StoreStatus& before, const StoreStatus& after) {
  if (before.counters.evicted_tail_copies != after.counters.evicted_tail_copies) {
    for (auto& [prefix, page] : twin_.pages) {
      if (StoreTwin::NumPages(prefix) > StoreTwin::kSink) {
        page.ForgetCopies();
      }
    }
  }
  if (before.counters.evicted_pages == after.counters.evicted_pages) {
    return;
  }
  std::set<std::string> gone;
  for (const auto& [prefix, page] : twin_.pages) {
    for (const ModelSession& watcher : watchers_) {
      const std::string salt = Salt(prefix);
      if (salt.substr(0, 2) != watcher.tenant) {
        continue;
      }
      const uint64_t heads = watcher.heads.Mask();
      const uint32_t expected = twin_.Matched(prefix, heads, false);
      const auto found = store_->Probe(watcher.id, salt.substr(2), Tokens(prefix));
      ASSERT_EQ(absl::OkStatus(), found.status());
      ASSERT_LE(found->matched_tokens, twin_.Matched(prefix, heads, true) * kPageTokens);
      for (uint32_t n = found->matched_tokens / kPageTokens; n < expected; ++n) {
        gone.insert(StoreTwin::First(prefix, n + 1));
      }
    }
  }
  for (const std::string& prefix : gone) {
    ASSERT_FALSE(twin_.IsHeld(prefix)) << prefix << " was evicted";
  }
  ASSERT_EQ(after.counters.evicted_pages - before.counters.evicted_pages, gone.size());
  twin_.Evicted(gone);
}

}  // namespace crumb
