// SPDX-License-Identifier: Apache-2.0
//
// The index at scale: 1,000,000 pages over 2,000 tenants. Each tenant has a system prompt of 60
// pages and conversations after it; every tenth has a document of 1,562 pages (100,000 tokens) too.
// What is measured is the longest match of such a document, cold: 200 of them in turn, in other
// memory than the index's, are 160 MB. A match must compare the tokens, so its limit is to read
// both: what copying 400 KB between the same cold arrays takes.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <iostream>
#include <memory>
#include <random>
#include <vector>

#include "bench/daemon/counting_new.h"
#include "bench/support/figure.h"
#include "daemon/index/radix_tree.h"
#include "daemon/store/page_store.h"
#include "proto/base/clock.h"

namespace crumb {
namespace {

constexpr size_t kNumTenants = 2000;
constexpr size_t kNumPages = 1'000'000;
constexpr size_t kSystemPages = 60;
constexpr size_t kDocumentPages = 1562;
constexpr size_t kTurnPages = 3;
constexpr size_t kNumDocuments = kNumTenants / 10;
// Of each tenant without a document, so that there are kNumPages in all.
constexpr size_t kOtherPages =
    (kNumPages - kNumDocuments * kDocumentPages) / (kNumTenants - kNumDocuments);

using Tokens = std::vector<uint32_t>;

Tokens RandomPages(std::mt19937_64* random, size_t pages) {
  Tokens tokens(pages * kPageTokens);
  for (uint32_t& token : tokens) {
    token = static_cast<uint32_t>((*random)() % 128'000);
  }
  return tokens;
}

void Append(Tokens* tokens, const Tokens& more) {
  tokens->insert(tokens->end(), more.begin(), more.end());
}

struct Corpus {
  std::vector<std::unique_ptr<RadixTree>> trees;
  std::vector<Tokens> documents;  // The prompts to look up,
  std::vector<size_t> tree_of;    // and where.
  double bytes_per_page = 0;      // Of the index, beyond its tokens.
};

// A conversation grows by a few pages a publish, and is one of many after the same system prompt.
void AddConversation(RadixTree* tree, const Tokens& system, size_t pages, std::mt19937_64* random) {
  Tokens prompt = system;
  for (size_t done = 0; done < pages; done += kTurnPages) {
    Append(&prompt, RandomPages(random, std::min(kTurnPages, pages - done)));
    tree->Extend(prompt, 1);
  }
}

Corpus BuildCorpus() {
  Corpus corpus;
  std::mt19937_64 random(1);
  for (size_t tenant = 0; tenant < kNumTenants; tenant += 10) {
    Tokens prompt = RandomPages(&random, kSystemPages);
    Append(&prompt, RandomPages(&random, kDocumentPages - kSystemPages));
    corpus.documents.push_back(std::move(prompt));
    corpus.tree_of.push_back(tenant);
  }
  const size_t before = bench::AllocatedBytes();
  size_t num_pages = 0;
  for (size_t tenant = 0; tenant < kNumTenants; ++tenant) {
    corpus.trees.push_back(std::make_unique<RadixTree>());
    RadixTree* const tree = corpus.trees.back().get();
    Tokens system;
    if (tenant % 10 == 0) {
      const Tokens& document = corpus.documents[tenant / 10];
      system.assign(document.begin(), document.begin() + kSystemPages * kPageTokens);
      tree->Extend(document, 1);
    } else {
      system = RandomPages(&random, kSystemPages);
      tree->Extend(system, 1);
    }
    while (tree->num_pages() < kOtherPages) {
      AddConversation(tree, system, std::min<size_t>(24, kOtherPages - tree->num_pages()), &random);
    }
    num_pages += tree->num_pages();
  }
  const size_t token_bytes = num_pages * kPageTokens * sizeof(uint32_t);
  corpus.bytes_per_page = static_cast<double>(bench::AllocatedBytes() - before - token_bytes) /
                          static_cast<double>(num_pages);
  size_t num_nodes = 0;
  for (const auto& tree : corpus.trees) {
    num_nodes += tree->num_nodes();
  }
  std::cerr << num_pages << " pages in " << num_nodes << " nodes of " << kNumTenants << " trees\n";
  return corpus;
}

double Microseconds(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start)
      .count();
}

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

void MeasureMatch(const Corpus& corpus) {
  std::vector<double> match_us;
  std::vector<double> copy_us;
  std::vector<Tokens> targets = corpus.documents;
  for (int round = 0; round < 5; ++round) {
    for (size_t i = 0; i < corpus.documents.size(); ++i) {
      auto start = std::chrono::steady_clock::now();
      const PrefixPosition found = corpus.trees[corpus.tree_of[i]]->Match(corpus.documents[i]);
      match_us.push_back(Microseconds(start));
      if (found.pages != kDocumentPages) {
        std::cerr << "match of " << found.pages << " pages\n";
        std::abort();
      }
      // Another document than the one whose tokens are now in the caches.
      const Tokens& source = corpus.documents[(i + 100) % corpus.documents.size()];
      start = std::chrono::steady_clock::now();
      std::memcpy(targets[i].data(), source.data(), source.size() * sizeof(uint32_t));
      benchmark::DoNotOptimize(targets[i].data());
      copy_us.push_back(Microseconds(start));
    }
  }
  bench::Register("index/match_100k_tokens", {.value = Median(match_us),
                                              .limit = Median(copy_us),
                                              .target = 100,
                                              .unit = "us",
                                              .limit_name = "copying the 400 KB, cold",
                                              .better = bench::Better::kLower});
  bench::Register("index/memory_beyond_tokens", {.value = corpus.bytes_per_page,
                                                 .limit = sizeof(PageSlots),
                                                 .target = 400,
                                                 .unit = "bytes/page",
                                                 .limit_name = "two handles a page",
                                                 .better = bench::Better::kLower});
}

// The same through the store: match, lease, page table, release. One small model, so that pages are
// small; nothing of this depends on their size.
void MeasureStore(const Corpus& corpus) {
  StoreOptions options;
  options.chunk_bytes = size_t{16} << 20;
  options.capacity_bytes = size_t{256} << 20;
  auto store = *PageStore::Create(options, Clock::System());
  SessionSpec spec{.client_name = "bench", .pid = 0, .tenant = "bench", .profile = {}, .heads = {}};
  spec.profile.geometry = {.num_layers = 1, .num_kv_heads = 1, .key_dim = 32, .value_dim = 32};
  const SessionId session = *store->OpenSession(spec);
  std::vector<double> lookup_us;
  std::vector<double> release_us;
  const size_t before = bench::AllocatedBytes();
  size_t num_pages = 0;
  for (size_t i = 0; i < 16; ++i) {
    num_pages += kDocumentPages;
    const PublishPlan plan = *store->BeginPublish(session, "", corpus.documents[i]);
    std::vector<WrittenBlock> written;
    for (const PageKey& key : plan.missing) {
      written.push_back({.page = key.page, .encoding = key.encoding, .head_crc32c = {0}});
    }
    if (!store->CommitPublish(session, plan.id, written).ok()) {
      std::abort();
    }
  }
  const size_t held = bench::AllocatedBytes() - before - num_pages * kPageTokens * sizeof(uint32_t);
  bench::Register("store/memory_beyond_tokens",
                  {.value = static_cast<double>(held) / static_cast<double>(num_pages),
                   .target = 400,
                   .unit = "bytes/page",
                   .limit_name = "",
                   .better = bench::Better::kLower});
  for (int round = 0; round < 20; ++round) {
    for (size_t i = 0; i < 16; ++i) {
      auto start = std::chrono::steady_clock::now();
      const LookupResult found = *store->Lookup(session, "", corpus.documents[i], true);
      lookup_us.push_back(Microseconds(start));
      start = std::chrono::steady_clock::now();
      if (!store->ReleaseLeases(session, {{found.lease}}).ok()) {
        std::abort();
      }
      release_us.push_back(Microseconds(start));
    }
  }
  bench::Register("store/lookup_100k_tokens", {.value = Median(lookup_us),
                                               .unit = "us",
                                               .limit_name = "",
                                               .better = bench::Better::kLower});
  bench::Register("store/release_100k_tokens", {.value = Median(release_us),
                                                .unit = "us",
                                                .limit_name = "",
                                                .better = bench::Better::kLower});
}

}  // namespace
}  // namespace crumb

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  const crumb::Corpus corpus = crumb::BuildCorpus();
  crumb::MeasureMatch(corpus);
  crumb::MeasureStore(corpus);
  benchmark::RunSpecifiedBenchmarks();
}
