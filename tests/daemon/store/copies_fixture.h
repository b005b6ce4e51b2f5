// SPDX-License-Identifier: Apache-2.0
//
// A store with a fake tier of copies beside it.
#pragma once

#include <sys/mman.h>

#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "tests/daemon/store/store_fixture.h"
#include "tests/support/fake_copy_tier.h"

namespace crumb {

// A segment takes two BF16 blocks, or nine of INT2.
inline constexpr size_t kSegmentBytes = size_t{72} << 10;

class CopiesTest : public StoreFixture {
 protected:
  void SetUp() override { RestartWith(4); }
  // Before the tier that it refers to.
  void TearDown() override {
    StoreFixture::TearDown();
    store_ = nullptr;
  }

  void RestartWith(uint32_t num_segments, const StoreOptions& options = {}) {
    store_ = nullptr;
    tier_.emplace(kSegmentBytes, num_segments);
    auto store = PageStore::Create(options, clock_, &*tier_);
    ASSERT_EQ(absl::OkStatus(), store.status());
    store_ = *std::move(store);
    session_ = AttachReader();
  }
  SessionId AttachReader(std::string tenant = "default", HeadRange heads = {}) {
    SessionSpec spec = SmallSession(std::move(tenant), heads);
    spec.reads_copies = true;
    const auto session = store_->OpenSession(spec);
    EXPECT_EQ(absl::OkStatus(), session.status());
    return session.value_or(SessionId());
  }
  size_t CopyEverything() { return CopyAll(store_.get(), &*tier_); }

  // Pages of a lookup that are there in the tier, in INT2.
  static std::vector<uint32_t> CopiedPages(const LookupResult& found) {
    std::vector<uint32_t> pages;
    for (uint32_t page = 0; page < found.pages.size(); ++page) {
      if (found.pages[page].int2_copy.has_value()) {
        pages.push_back(page);
      }
    }
    return pages;
  }
  // What a process that maps the copy sees of it, by the descriptors alone.
  struct Seen {
    PageHeader header;
    std::vector<std::byte> image;
  };
  Seen Map(SessionId session, const BlockRef& ref, PageEncoding encoding) {
    Seen seen;
    auto chunk = store_->GetCopyChunk(session, ref.chunk);
    EXPECT_EQ(absl::OkStatus(), chunk.status());
    if (!chunk.ok()) {
      return seen;
    }
    const ChunkLayout layout{kGeometry.PageBytes(encoding), chunk->num_blocks};
    void* const table =
        ::mmap(nullptr, layout.block_offset(0), PROT_READ, MAP_SHARED, chunk->headers.get(), 0);
    void* const memory =
        ::mmap(nullptr, chunk->memory_bytes, PROT_READ, MAP_SHARED, chunk->memory.get(), 0);
    std::memcpy(&seen.header,
                static_cast<const std::byte*>(table) + ChunkLayout::header_offset(ref.block),
                sizeof(PageHeader));
    const auto* image = static_cast<const std::byte*>(memory) + ref.block * layout.block_stride();
    seen.image.assign(image, image + layout.image_bytes);
    ::munmap(table, layout.block_offset(0));
    ::munmap(memory, chunk->memory_bytes);
    return seen;
  }
  void ExpectCopyHolds(const BlockRef& ref, PageKey key, std::string_view letters) {
    const Seen seen = Map(session_, ref, key.encoding);
    EXPECT_EQ(ref.generation.value(), seen.header.generation);
    EXPECT_TRUE(
        BlockHolds({key, seen.header, seen.image}, "", PagesOf(letters), kAllHeads, kGeometry))
        << letters << " page " << key.page.value();
  }

  std::optional<FakeCopyTier> tier_;
};

}  // namespace crumb
