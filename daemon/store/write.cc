// SPDX-License-Identifier: Apache-2.0
//
// StoreCore: blocks of unfinished publishes while they are written, and what is known of those that
// have been.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "daemon/store/store_core.h"
#include "proto/base/check.h"
#include "proto/base/status_macros.h"

namespace crumb::store_internal {
namespace {

absl::string_view Name(PageEncoding encoding) {
  return encoding == PageEncoding::kInt2 ? "INT2" : "BF16";
}

auto FirstItem(Publish* publish, const PageKey& key) {
  return std::lower_bound(publish->items.begin(), publish->items.end(), key,
                          [](const PublishItem& item, const PageKey& k) { return item.key < k; });
}

PublishItem* FindItem(Publish* publish, const PageKey& key) {
  const auto place = FirstItem(publish, key);
  return place != publish->items.end() && place->key == key ? &*place : nullptr;
}

absl::Status NotInPlan(const Publish& publish, const PageKey& key) {
  return absl::InvalidArgumentError(absl::StrCat(
      Describe(key), " is not in the plan of publish ", publish.id.value(), " of ",
      publish.num_pages(), " pages, ", publish.items.size(), " blocks: write what it lacks only"));
}

absl::Status Twice(const PageKey& key) {
  return absl::InvalidArgumentError(
      absl::StrCat(Describe(key),
                   " comes twice, or out of order: pages ascend, and INT2 comes "
                   "before BF16 of one page"));
}

absl::Status CheckChecksums(const Publish& publish, const WrittenBlock& block) {
  if (block.head_crc32c.size() == publish.heads.count) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat(Describe({block.page, block.encoding}), " has ", block.head_crc32c.size(),
                   " checksums; the session's ", publish.heads.count, " KV heads have one each"));
}

absl::Status StillWritten(const Publish& publish, const PageKey& key) {
  return absl::FailedPreconditionError(
      absl::StrCat(Describe(key), " of publish ", publish.id.value(),
                   " is still being written; wait until that has ended"));
}

// Beyond the sink rows in BF16 serve recent windows only.
bool IsTailCopy(const Publish& publish, const PageKey& key) {
  return key.encoding == PageEncoding::kBf16 && key.page.value() >= publish.ns->sink_pages();
}

}  // namespace

std::string Describe(const PageKey& key) {
  return absl::StrCat("page ", key.page.value(), " in ", Name(key.encoding));
}

absl::StatusOr<WriteHold> StoreCore::BeginWrite(SessionId session_id,
                                                PublishId id,
                                                std::span<const PageIdx> pages) {
  CRUMB_ASSIGN_OR_RETURN(Publish* const publish, FindPublish(session_id, id));
  std::vector<PublishItem*> items;
  auto item = pages.empty() ? publish->items.begin()
                            : FirstItem(publish, {pages.front(), PageEncoding::kInt2});
  for (; item != publish->items.end() && (pages.empty() || item->key.page <= pages.back());
       ++item) {
    const bool is_asked_for =
        pages.empty() || std::binary_search(pages.begin(), pages.end(), item->key.page);
    if (!is_asked_for || item->written.has_value()) {
      continue;
    }
    if (item->writing) {
      return absl::FailedPreconditionError(absl::StrCat(Describe(item->key), " of publish ",
                                                        id.value(), " is being written already"));
    }
    items.push_back(&*item);
  }
  WriteHold hold{.store = nullptr,
                 .publish = id,
                 .ns = publish->ns,
                 .heads = publish->heads.Mask(),
                 .slots = {},
                 .blocks = {}};
  for (PublishItem* held : items) {
    held->writing = true;
    StoredBlock& block = blocks_[held->slot];
    ++block.holds;
    const size_t range_bytes = publish->ns->profile.geometry.HeadRangeBytes(held->key.encoding);
    hold.slots.push_back(held->slot);
    const size_t offset = publish->heads.first * range_bytes;
    hold.blocks.push_back(
        {.key = held->key,
         .bytes =
             block.chunk->Image(block.index).subspan(offset, publish->heads.count * range_bytes),
         .fresh = block.chunk->Fresh(block.index, offset)});
  }
  ++writes_;
  return hold;
}

void StoreCore::EndWrite(const WriteHold& hold) {
  --writes_;
  if (hold.slots.empty()) {
    return;  // It kept nothing, so its namespace may be gone.
  }
  const auto place = publishes_.find(hold.publish);
  for (size_t i = 0; i < hold.slots.size(); ++i) {
    const BlockSlot slot = hold.slots[i];
    --blocks_[slot].holds;
    if (place != publishes_.end()) {
      FindItem(place->second.get(), hold.blocks[i].key)->writing = false;
    } else {
      // The publish ended meanwhile and left us its claim: nobody else could be let in.
      PrefixNode* const node = blocks_[slot].node;
      Unclaim(hold.ns, slot, hold.heads);
      if (node != nullptr) {
        TrimUnusedPages(hold.ns, node);
      }
    }
  }
  DropNamespaceIfEmpty(hold.ns);
}

absl::Status StoreCore::KeepWritten(SessionId session_id,
                                    PublishId id,
                                    std::vector<WrittenBlock> written) {
  CRUMB_ASSIGN_OR_RETURN(Publish* const publish, FindPublish(session_id, id));
  std::vector<PublishItem*> items;
  for (const WrittenBlock& block : written) {
    const PageKey key{block.page, block.encoding};
    PublishItem* const item = FindItem(publish, key);
    if (item == nullptr) {
      return NotInPlan(*publish, key);
    }
    if (item->written.has_value() || (!items.empty() && !(items.back()->key < key))) {
      return Twice(key);
    }
    if (item->writing) {
      return StillWritten(*publish, key);
    }
    CRUMB_RETURN_IF_ERROR(CheckChecksums(*publish, block));
    items.push_back(item);
  }
  for (size_t i = 0; i < items.size(); ++i) {
    items[i]->written = std::move(written[i]);
  }
  return absl::OkStatus();
}

// What was written of each item of the plan, null where nothing was and nothing had to be.
absl::StatusOr<std::vector<const WrittenBlock*>> StoreCore::MatchWritten(
    const Publish& publish, std::span<const WrittenBlock> written) const {
  std::vector<const WrittenBlock*> result;
  result.reserve(publish.items.size());
  for (const PublishItem& planned : publish.items) {
    result.push_back(planned.written.has_value() ? &*planned.written : nullptr);
  }
  size_t item = 0;
  for (const WrittenBlock& block : written) {
    const PageKey key{block.page, block.encoding};
    while (item < publish.items.size() && publish.items[item].key < key) {
      ++item;
    }
    if (item == publish.items.size() || publish.items[item].key != key) {
      const bool seen = item > 0 && !(publish.items[item - 1].key < key);
      return seen ? Twice(key) : NotInPlan(publish, key);
    }
    if (result[item] != nullptr) {
      return Twice(key);
    }
    CRUMB_RETURN_IF_ERROR(CheckChecksums(publish, block));
    result[item++] = &block;
  }
  for (size_t i = 0; i < publish.items.size(); ++i) {
    const PublishItem& planned = publish.items[i];
    if (result[i] == nullptr && !IsTailCopy(publish, planned.key)) {
      return absl::InvalidArgumentError(
          absl::StrCat(Describe(planned.key),
                       " was not written: pages of the sink are needed in BF16, all "
                       "others in INT2; only the tail's BF16 may be left out"));
    }
    if (planned.writing) {
      return StillWritten(publish, planned.key);
    }
  }
  return result;
}

}  // namespace crumb::store_internal
