// SPDX-License-Identifier: Apache-2.0
//
// The index at scale: 1,000,000 pages over 2,000 tenants. What is measured is the longest match of
// a document of 1,562 pages (100,000 tokens), cold: 200 of them in turn, in other memory than the
// index's, are 160 MB. A match must compare the tokens, so its limit is to read
// both: what copying 400 KB between the same cold arrays takes.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <iostream>
#include <memory>
#include <span>
#include <vector>

#include "bench/daemon/counting_new.h"
#include "bench/daemon/prompt_corpus.h"
#include "bench/support/figure.h"
#include "daemon/index/radix_tree.h"
#include "daemon/store/page_store.h"
#include "proto/base/clock.h"

namespace crumb {
namespace {

using bench::PromptCorpus;

constexpr size_t kDocumentPages = PromptCorpus::kDocumentPages;

struct Corpus {
  std::vector<std::unique_ptr<RadixTree>> trees;
  PromptCorpus prompts;
  double bytes_per_page = 0;  // Of the index, beyond its tokens.
};

Corpus BuildCorpus() {
  Corpus corpus;
  const size_t before = bench::AllocatedBytes();
  const size_t num_pages =
      corpus.prompts.ForEachPublish([&](size_t tenant, std::span<const uint32_t> prompt) {
        if (tenant == corpus.trees.size()) {
          corpus.trees.push_back(std::make_unique<RadixTree>());
        }
        corpus.trees[tenant]->Extend(prompt, 1);
      });
  const size_t token_bytes = num_pages * kPageTokens * sizeof(uint32_t);
  corpus.bytes_per_page = static_cast<double>(bench::AllocatedBytes() - before - token_bytes) /
                          static_cast<double>(num_pages);
  size_t num_nodes = 0;
  for (const auto& tree : corpus.trees) {
    num_nodes += tree->num_nodes();
  }
  std::cerr << num_pages << " pages in " << num_nodes << " nodes of " << corpus.trees.size()
            << " trees\n";
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
  const std::vector<std::vector<uint32_t>>& documents = corpus.prompts.documents();
  std::vector<std::vector<uint32_t>> targets = documents;
  for (int round = 0; round < 5; ++round) {
    for (size_t i = 0; i < documents.size(); ++i) {
      auto start = std::chrono::steady_clock::now();
      const PrefixPosition found = corpus.trees[PromptCorpus::TenantOf(i)]->Match(documents[i]);
      match_us.push_back(Microseconds(start));
      if (found.pages != kDocumentPages) {
        std::cerr << "match of " << found.pages << " pages\n";
        std::abort();
      }
      // Another document than the one whose tokens are now in the caches.
      const std::vector<uint32_t>& source = documents[(i + 100) % documents.size()];
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
    const PublishPlan plan = *store->BeginPublish(session, "", corpus.prompts.documents()[i]);
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
      const LookupResult found = *store->Lookup(session, "", corpus.prompts.documents()[i], true);
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
