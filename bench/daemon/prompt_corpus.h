// SPDX-License-Identifier: Apache-2.0
//
// The prompts that lookups are measured against: 1,000,000 pages over 2,000 tenants. Each tenant
// has a system prompt of 60 pages and conversations after it; every tenth has a document of 1,562
// pages (100,000 tokens) instead. Random tokens, the same in every run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace crumb::bench {

// Thread-compatible.
class PromptCorpus {
 public:
  static constexpr size_t kNumTenants = 2000;
  static constexpr size_t kNumPages = 1'000'000;
  static constexpr size_t kDocumentPages = 1562;
  static constexpr size_t kNumDocuments = kNumTenants / 10;

  PromptCorpus();

  // Prompts of kDocumentPages whole pages.
  const std::vector<std::vector<uint32_t>>& documents() const { return documents_; }
  static constexpr size_t TenantOf(size_t document) { return document * 10; }

  // Calls `publish` with every prompt that is published, tenant by tenant, whole pages each. A
  // conversation grows by a few pages a publish, and is one of many after the same system prompt.
  // Returns the number of pages that differ.
  size_t ForEachPublish(
      const std::function<void(size_t tenant, std::span<const uint32_t> prompt)>& publish) const;

 private:
  std::vector<std::vector<uint32_t>> documents_;
};

}  // namespace crumb::bench
