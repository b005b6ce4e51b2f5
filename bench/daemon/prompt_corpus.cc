// SPDX-License-Identifier: Apache-2.0
#include "bench/daemon/prompt_corpus.h"

#include <algorithm>
#include <random>

#include "proto/page/page_format.h"

namespace crumb::bench {
namespace {

constexpr size_t kSystemPages = 60;
constexpr size_t kConversationPages = 24;
constexpr size_t kTurnPages = 3;
// Of each tenant without a document, so that there are kNumPages in all.
constexpr size_t kOtherPages =
    (PromptCorpus::kNumPages - PromptCorpus::kNumDocuments * PromptCorpus::kDocumentPages) /
    (PromptCorpus::kNumTenants - PromptCorpus::kNumDocuments);

void AppendRandomPages(std::vector<uint32_t>& tokens, size_t pages, std::mt19937_64& random) {
  for (size_t i = 0; i < pages * kPageTokens; ++i) {
    tokens.push_back(static_cast<uint32_t>(random() % 128'000));
  }
}

}  // namespace

PromptCorpus::PromptCorpus() : documents_(kNumDocuments) {
  std::mt19937_64 random(1);
  for (std::vector<uint32_t>& document : documents_) {
    AppendRandomPages(document, kDocumentPages, random);
  }
}

size_t PromptCorpus::ForEachPublish(
    const std::function<void(size_t tenant, std::span<const uint32_t> prompt)>& publish) const {
  std::mt19937_64 random(2);
  size_t num_pages = 0;
  for (size_t tenant = 0; tenant < kNumTenants; ++tenant) {
    if (tenant % TenantOf(1) == 0) {
      publish(tenant, documents_[tenant / TenantOf(1)]);
      num_pages += kDocumentPages;
      continue;
    }
    std::vector<uint32_t> system;
    AppendRandomPages(system, kSystemPages, random);
    publish(tenant, system);
    for (size_t pages = kSystemPages; pages < kOtherPages;) {
      const size_t conversation = std::min(kConversationPages, kOtherPages - pages);
      std::vector<uint32_t> prompt = system;
      for (size_t done = 0; done < conversation; done += kTurnPages) {
        AppendRandomPages(prompt, std::min(kTurnPages, conversation - done), random);
        publish(tenant, prompt);
      }
      pages += conversation;
    }
    num_pages += kOtherPages;
  }
  return num_pages;
}

}  // namespace crumb::bench
