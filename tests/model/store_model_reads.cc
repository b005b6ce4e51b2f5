// SPDX-License-Identifier: Apache-2.0
//
// StoreModel: sessions, lookups, leases and reads.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <set>
#include <utility>

#include "proto/page/chunk_layout.h"
#include "tests/model/store_model.h"

namespace crumb {
namespace {

const Geometry kGeometry = SmallPageProfile().geometry;
constexpr HeadRange kRanges[] = {{0, 4}, {0, 2}, {2, 2}};
constexpr int kMaxPages = 6;

}  // namespace

StoreModel::StoreModel(uint64_t seed, size_t capacity_bytes, TwinFault fault, uint32_t num_segments)
    : random_(seed),
      tier_(num_segments == 0 ? nullptr
                              : std::make_unique<FakeCopyTier>(size_t{144} << 10, num_segments)),
      twin_(fault) {
  StoreOptions options;
  options.capacity_bytes = capacity_bytes;
  options.chunk_bytes = 256 << 10;
  options.lease = absl::Seconds(10);
  options.lease_grace = absl::Seconds(1);
  options.quarantine = absl::Seconds(5);
  store_ = *PageStore::Create(options, clock_, tier_.get());
  for (const char* tenant : {"t0", "t1"}) {
    for (const HeadRange& heads : kRanges) {
      watchers_.push_back({*store_->OpenSession(SmallSession(tenant, heads)), tenant, heads});
    }
  }
}

void StoreModel::Step() {
  const int dice = Uniform(100);
  if (sessions_.empty() || dice < 2) {
    OpenSession();
  } else if (dice < 3) {
    EndSession();
  } else if (dice < 33) {
    Lookup();
  } else if (dice < 51) {
    Begin();
  } else if (dice < 70) {
    WriteOrCommit();
  } else if (dice < 73) {
    Abort();
  } else if (dice < 78) {
    Renew();
  } else if (dice < 88) {
    Release();
  } else if (dice < 94) {
    BeginOrEndRead();
  } else if (dice < 95) {
    Evict();
  } else {
    clock_.Advance(absl::Milliseconds(Uniform(6000)));
    Tick();
  }
  if (tier_ != nullptr) {
    CopyAll();
  }
  twin_.Trim();
}

void StoreModel::Check() {
  ASSERT_EQ(absl::OkStatus(), store_->CheckInvariants());
  const StoreStatus status = store_->Status();
  const auto resident = std::count_if(twin_.pages.begin(), twin_.pages.end(),
                                      [](const auto& entry) { return entry.second.IsResident(); });
  uint64_t pages = 0;
  for (const NamespaceStatus& ns : status.namespaces) {
    pages += ns.pages;
  }
  ASSERT_EQ(static_cast<uint64_t>(resident), pages);
  ASSERT_EQ(leases_.size(), status.leases + status.quarantined_leases);
  ASSERT_LE(status.used_bytes, status.chunk_bytes);
  ASSERT_LE(status.chunk_bytes, status.capacity_bytes);
}

void StoreModel::EndAll() {
  while (!sessions_.empty()) {
    EndSession();
  }
  for (const ModelRead& read : reads_) {
    --twin_.pages.at(read.prefix).pins;
  }
  reads_.clear();
  for (ModelPublish& publish : publishes_) {
    CloseGuard(&publish);
  }
  publishes_.clear();
  clock_.Advance(absl::Seconds(20));
  Tick();
  twin_.Trim();
  ASSERT_EQ(0u, store_->Status().leased_pages);
  ASSERT_EQ(0u, store_->Status().unfinished_bytes);
}

std::string StoreModel::RandomLetters() {
  std::string letters;
  for (int n = 1 + Uniform(kMaxPages); n > 0; --n) {
    letters.push_back(static_cast<char>('a' + Uniform(Uniform(3) == 0 ? 3 : 1)));
  }
  return letters;
}

void StoreModel::OpenSession() {
  if (sessions_.size() >= 6) {
    return;
  }
  ModelSession session{{}, Uniform(2) == 0 ? "t0" : "t1", kRanges[Uniform(3)]};
  SessionSpec spec = SmallSession(session.tenant, session.heads);
  spec.reads_copies = tier_ != nullptr && Uniform(2) == 0;
  session.id = *store_->OpenSession(spec);
  sessions_.emplace(session.id, session);
}

void StoreModel::EndSession() {
  const auto session = Pick(sessions_);
  store_->EndSession(session->first);
  for (ModelPublish& publish : publishes_) {
    if (publish.session == session->first && !publish.is_over) {
      EndPublish(&publish);
    }
  }
  std::erase_if(publishes_, [](const auto& p) { return p.is_over && !p.guard.has_value(); });
  for (ModelLease& lease : leases_) {
    if (lease.session == session->first && !lease.in_quarantine) {
      lease.in_quarantine = true;
      lease.end = clock_.Now() + absl::Seconds(5);
    }
  }
  sessions_.erase(session);
}

void StoreModel::Tick() {
  std::erase_if(leases_, [&](ModelLease& lease) {
    if (!lease.in_quarantine && lease.end <= clock_.Now()) {
      lease.in_quarantine = true;
      lease.end += absl::Seconds(5);
    }
    const bool is_over = lease.in_quarantine && lease.end <= clock_.Now();
    twin_.pages.at(lease.prefix).pins -= is_over ? 1 : 0;
    return is_over;
  });
  store_->Tick();
}

void StoreModel::Lookup() {
  const ModelSession& session = Pick(sessions_)->second;
  const std::string key = RandomKey();
  const std::string letters = RandomLetters();
  const std::string prefix = Join(session.tenant, key, letters);
  const auto prompt = PromptOf(letters, static_cast<uint32_t>(Uniform(200)));
  const auto num_tokens = static_cast<uint32_t>(prompt.size());
  const bool allow = Uniform(4) == 0;
  const uint64_t heads = session.heads.Mask();
  const uint32_t least = twin_.Usable(prefix, num_tokens, heads, allow, false);
  const uint32_t most = twin_.Usable(prefix, num_tokens, heads, allow, true);
  const auto found = store_->Lookup(session.id, key, prompt, allow);
  ASSERT_EQ(absl::OkStatus(), found.status());
  const auto usable = static_cast<uint32_t>(found->pages.size());
  const uint32_t matched = found->length.matched_tokens / kPageTokens;
  ASSERT_LE(twin_.Matched(prefix, heads, false), matched) << prefix;
  ASSERT_LE(matched, twin_.Matched(prefix, heads, true)) << prefix;
  ASSERT_LE(least, usable) << prefix;
  ASSERT_LE(usable, most) << prefix;
  ASSERT_EQ(usable * kPageTokens, found->length.usable_tokens);
  ASSERT_EQ(usable > 0, found->lease != LeaseId(0));
  if (usable == 0) {
    return;
  }
  const std::string leased = StoreTwin::First(prefix, usable);
  ++twin_.pages.at(leased).pins;
  leases_.push_back({found->lease, session.id, session.heads, leased, found->pages,
                     clock_.Now() + absl::Seconds(11), false});
  for (uint32_t p = 0; p < usable; ++p) {
    const PageRef& page = found->pages[p];
    ASSERT_TRUE(page.int2.has_value() || page.bf16.has_value())
        << prefix << " page " << p << " of " << usable << " is leased without rows";
  }
  if (!allow) {  // Whatever is in the recent window is there in BF16.
    for (uint32_t p = 0; p < usable; ++p) {
      if ((p + 1 + StoreTwin::kRecent) * kPageTokens > num_tokens) {
        ASSERT_TRUE(found->pages[p].bf16.has_value()) << prefix << " page " << p;
      }
    }
  }
  VerifyLease(leases_.back());
  VerifyCopies(leases_.back());
}

void StoreModel::CopyAll() {
  tier_->out_of_memory = Uniform(4) == 0;
  for (const uint32_t segment : store_->TakeSpentSegments()) {
    unready_segments_.push_back(segment);
  }
  std::erase_if(unready_segments_, [&](uint32_t segment) {
    const bool renewed = tier_->Renew(segment).ok();
    if (renewed) {
      store_->ReturnSegment(segment);
    }
    return renewed;
  });
  while (store_->Status().waiting_promotions > 0) {
    tier_->flips_a_bit = Uniform(8) == 0;
    CopyBatch batch = store_->BeginCopies(static_cast<size_t>(1 + Uniform(100'000)));
    const auto results = tier_->Write(batch.copies());
    if (Uniform(4) == 0 && !sessions_.empty()) {  // Lookups meet copies that are on their way.
      Lookup();
    }
    ASSERT_EQ(absl::OkStatus(), store_->CheckInvariants());
    for (size_t i = 0; i < results.size(); ++i) {
      if (results[i].ok() && Uniform(16) != 0) {
        batch.SetArrived(i);
      }
    }
  }
  if (!leases_.empty()) {
    VerifyCopies(*Pick(leases_));
  }
}

void StoreModel::VerifyCopies(const ModelLease& lease) {
  for (uint32_t p = 0; p < lease.pages.size(); ++p) {
    if (lease.pages[p].int2_copy.has_value()) {
      VerifyCopy(lease, *lease.pages[p].int2_copy, {PageIdx(p), PageEncoding::kInt2});
    }
    if (lease.pages[p].bf16_copy.has_value()) {
      VerifyCopy(lease, *lease.pages[p].bf16_copy, {PageIdx(p), PageEncoding::kBf16});
    }
  }
}

void StoreModel::VerifyCopy(const ModelLease& lease, const BlockRef& ref, PageKey key) {
  // Whoever of the tenant asks for it: the lease may be in quarantine, without its session.
  const std::string tenant = Salt(lease.prefix).substr(0, 2);
  const auto watcher = std::find_if(watchers_.begin(), watchers_.end(),
                                    [&](const auto& w) { return w.tenant == tenant; });
  const auto chunk = store_->GetCopyChunk(watcher->id, ref.chunk);
  ASSERT_EQ(absl::OkStatus(), chunk.status()) << lease.prefix << " page " << key.page.value();
  const ChunkLayout layout{kGeometry.PageBytes(key.encoding), chunk->num_blocks};
  PinnedPage page{.key = key, .header = {}, .bytes = {}};
  ASSERT_EQ(static_cast<ssize_t>(sizeof(PageHeader)),
            ::pread(chunk->headers.get(), &page.header, sizeof(PageHeader),
                    static_cast<off_t>(ChunkLayout::header_offset(ref.block))));
  const size_t range_bytes = kGeometry.HeadRangeBytes(key.encoding);
  std::vector<std::byte> bytes(lease.heads.count * range_bytes);
  ASSERT_EQ(static_cast<ssize_t>(bytes.size()),
            ::pread(chunk->memory.get(), bytes.data(), bytes.size(),
                    static_cast<off_t>(ref.block * layout.block_stride() +
                                       lease.heads.first * range_bytes)));
  page.bytes = bytes;
  ASSERT_EQ(ref.generation.value(), page.header.generation);
  ASSERT_TRUE(BlockHolds(page, Salt(lease.prefix), Tokens(lease.prefix), lease.heads, kGeometry))
      << "the copy of " << lease.prefix << " page " << key.page.value();
  ++verified_copies_;
}

void StoreModel::VerifyLease(const ModelLease& lease) {
  std::vector<PageKey> keys;
  std::vector<BlockRef> places;
  for (uint32_t p = 0; p < lease.pages.size(); ++p) {
    if (lease.pages[p].int2.has_value()) {
      keys.push_back({PageIdx(p), PageEncoding::kInt2});
      places.push_back(*lease.pages[p].int2);
    }
    if (lease.pages[p].bf16.has_value()) {
      keys.push_back({PageIdx(p), PageEncoding::kBf16});
      places.push_back(*lease.pages[p].bf16);
    }
  }
  auto read = store_->BeginRead(lease.session, lease.id, keys);
  ASSERT_EQ(absl::OkStatus(), read.status());
  for (size_t i = 0; i < keys.size(); ++i) {
    const PinnedPage& page = read->pages()[i];
    ASSERT_TRUE(BlockHolds(page, Salt(lease.prefix), Tokens(lease.prefix), lease.heads, kGeometry));
  }
  if (Uniform(8) == 0 && reads_.size() < 8) {
    ++twin_.pages.at(lease.prefix).pins;
    reads_.push_back({*std::move(read), lease.prefix, lease.heads});
  }
}

void StoreModel::BeginOrEndRead() {
  if (reads_.empty() || Uniform(2) == 0) {
    std::vector<const ModelLease*> in_force;
    for (const ModelLease& lease : leases_) {
      if (!lease.in_quarantine) {
        in_force.push_back(&lease);
      } else {
        ASSERT_EQ(absl::StatusCode::kFailedPrecondition,
                  store_->BeginRead(lease.session, lease.id, {}).status().code());
      }
    }
    if (!in_force.empty()) {
      VerifyLease(**Pick(in_force));
    }
    return;
  }
  const auto read = Pick(reads_);
  for (const PinnedPage& page : read->guard.pages()) {  // Whatever has happened since.
    ASSERT_TRUE(BlockHolds(page, Salt(read->prefix), Tokens(read->prefix), read->heads, kGeometry));
  }
  --twin_.pages.at(read->prefix).pins;
  reads_.erase(read);
}

void StoreModel::Renew() {
  std::map<SessionId, std::vector<LeaseId>> by_session;
  for (ModelLease& lease : leases_) {
    if (Uniform(2) == 0) {
      by_session[lease.session].push_back(lease.id);
    }
  }
  for (const auto& [session, ids] : by_session) {
    const auto ended = store_->RenewLeases(session, ids);
    ASSERT_EQ(Find(session) != nullptr, ended.ok());
    for (ModelLease& lease : leases_) {
      if (ended.ok() && std::count(ids.begin(), ids.end(), lease.id) > 0) {
        const bool is_over = std::count(ended->begin(), ended->end(), lease.id) > 0;
        ASSERT_EQ(lease.in_quarantine, is_over);
        lease.end = is_over ? lease.end : clock_.Now() + absl::Seconds(11);
      }
    }
  }
}

void StoreModel::Release() {
  for (int n = 0; n < 3 && !leases_.empty(); ++n) {
    const auto lease = Pick(leases_);
    const auto status = store_->ReleaseLeases(lease->session, {{lease->id}});
    ASSERT_EQ(Find(lease->session) != nullptr, status.ok());
    if (!lease->in_quarantine) {
      --twin_.pages.at(lease->prefix).pins;
      leases_.erase(lease);
    }
  }
}

}  // namespace crumb
