// SPDX-License-Identifier: Apache-2.0
//
// A radix tree over the tokens of prompts, at the granularity of whole pages, with path
// compression: a node is a run of pages that so far always came together. One tree a namespace.
// Pure: no I/O, no clock, no lock; times are stamps that the caller hands in.
//
//   root ── [system prompt: 40 pages] ─┬─ [conversation A: 12 pages] ── ...
//                                      └─ [conversation B: 3 pages]
//
// What a page is to its owner, the tree does not know: it keeps two handles a page (PageSlots).
// A match compares the tokens themselves; hashes only choose which child to compare.
//
// Benefits: one match costs one pass over the prompt's tokens, and a hash probe a node. Recency and
// pins are kept a node, or a pinned page, so that using a prefix of 1,500 pages touches a few
// nodes. Costs: the tokens are kept (256 bytes a page). Splitting a node moves its pages. Nodes
// that eviction leaves with one child are not merged again; there are never more nodes than pages.
//
// Invariants, checked by CheckInvariants():
//   1. Each node but the root has at least one page, and 64 tokens a page.
//   2. Siblings differ in their first page, so a prefix has one place.
//   3. A page at or above a pin is held: RemoveLastPage never removes it.
//   4. A node is never used later than its parent.
//
// Thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"

#include "proto/base/ids.h"
#include "proto/page/page_format.h"

namespace crumb {

// The owner's handles of a page's content. 0: none.
struct PageSlots {
  uint32_t int2 = 0;
  uint32_t bf16 = 0;
};

class PrefixNode;

// The end of a prefix: page `pages - 1` lies in `node`. No pages: the root.
struct PrefixPosition {
  PrefixNode* node = nullptr;
  uint32_t pages = 0;
};

// Holds one page, and so all pages before it. Counted: any number of holders share one pin.
struct PrefixPin {
  PrefixNode* node = nullptr;
  uint32_t last_page = 0;
  uint32_t count = 0;
};

class PrefixNode {
 public:
  ~PrefixNode() = default;
  PrefixNode(const PrefixNode&) = delete;
  PrefixNode& operator=(const PrefixNode&) = delete;

  // Null for the root.
  PrefixNode* parent() const { return parent_; }
  bool is_root() const { return parent_ == nullptr; }
  bool is_leaf() const { return children_.empty(); }
  uint32_t first_page() const { return first_page_; }
  uint32_t num_pages() const { return static_cast<uint32_t>(pages_.size()); }
  uint32_t end_page() const { return first_page_ + num_pages(); }
  std::span<const uint32_t> tokens() const { return tokens_; }
  // Of pages [first_page(), end_page()).
  std::span<PageSlots> pages() { return pages_; }
  std::span<const PageSlots> pages() const { return pages_; }
  size_t num_children() const { return children_.size(); }
  // In no order. The visitor takes a PrefixNode&.
  template <typename Visitor>
  void VisitChildren(Visitor visitor) const {
    for (const auto& child : children_) {
      visitor(*child);
    }
  }

  // Pages from the node's first on that a pin holds.
  uint32_t held_pages() const;
  // Pins in this node's pages and below it. Different from 0: all its ancestors are held.
  uint32_t pins_below() const { return subtree_pins_; }
  // A pin at page `page_idx` or after it, in this node or below. page_idx lies in this node.
  bool IsHeld(uint32_t page_idx) const { return page_idx - first_page_ < held_pages(); }
  std::span<const std::unique_ptr<PrefixPin>> pins() const { return pins_; }

  // When the page `page_idx` was last used: the stamp of the last Touch that reached it.
  int64_t LastUse(uint32_t page_idx) const {
    return page_idx - first_page_ < warm_pages_ ? warm_use_ : last_use_;
  }
  uint64_t hits() const { return hits_; }

 private:
  friend class RadixTree;
  struct FirstPageHash {
    using is_transparent = void;
    size_t operator()(std::span<const uint32_t> page) const;
    size_t operator()(const std::unique_ptr<PrefixNode>& node) const;
  };
  struct FirstPageEq {
    using is_transparent = void;
    template <typename A, typename B>
    bool operator()(const A& a, const B& b) const {
      return Equal(Page(a), Page(b));
    }
    static std::span<const uint32_t> Page(std::span<const uint32_t> page) { return page; }
    static std::span<const uint32_t> Page(const std::unique_ptr<PrefixNode>& node);
    static bool Equal(std::span<const uint32_t> a, std::span<const uint32_t> b);
  };

  PrefixNode() = default;
  std::span<const uint32_t> first_page_tokens() const {
    return std::span(tokens_).first(kPageTokens);
  }

  PrefixNode* parent_ = nullptr;
  uint32_t first_page_ = 0;
  uint32_t subtree_pins_ = 0;
  std::vector<uint32_t> tokens_;
  std::vector<PageSlots> pages_;
  absl::flat_hash_set<std::unique_ptr<PrefixNode>, FirstPageHash, FirstPageEq> children_;
  std::vector<std::unique_ptr<PrefixPin>> pins_;  // Ascending by page; each count > 0.
  // Recency of two runs of pages: [0, warm_pages_) were used at warm_use_, the rest at last_use_.
  // So that a system prompt that a thousand requests share does not keep alive what the first of
  // them said after it.
  int64_t last_use_ = 0;
  int64_t warm_use_ = 0;
  uint32_t warm_pages_ = 0;
  uint64_t hits_ = 0;
};

class RadixTree {
 public:
  RadixTree();
  ~RadixTree();
  RadixTree(const RadixTree&) = delete;
  RadixTree& operator=(const RadixTree&) = delete;

  // The longest prefix of `tokens`, in whole pages, that is in the tree.
  PrefixPosition Match(std::span<const uint32_t> tokens) const;

  struct Extension {
    PrefixPosition end;      // Of all of `tokens`.
    uint32_t old_pages = 0;  // What Match would have found; the pages after it have empty slots.
    // The node that this call made of the upper part of another one, whose pages have moved into
    // it. Null: none.
    PrefixNode* split_off = nullptr;
  };
  // Makes all pages of `tokens` exist: a multiple of kPageTokens, at least one page; a use of them
  // all at `stamp`.
  Extension Extend(std::span<const uint32_t> tokens, int64_t stamp);

  // From the root's first child to the position's node, with no root; empty for no pages.
  static absl::InlinedVector<PrefixNode*, 16> Path(PrefixPosition position);
  // The node of a page of the position's prefix.
  static PrefixNode* NodeOf(PrefixPosition position, uint32_t page_idx);

  // Marks all pages before the position as used. Stamps never go back.
  static void Touch(PrefixPosition position, int64_t stamp);
  // The same, and counts a hit of each node on the way.
  static void TouchAsHit(PrefixPosition position, int64_t stamp);

  // Holds the position's pages (at least one) until as many Unpins. The pin is valid until then.
  PrefixPin* Pin(PrefixPosition position);
  static PrefixPin* PinAgain(PrefixPin* pin);
  void Unpin(PrefixPin* pin);
  static PrefixPosition PositionOf(const PrefixPin& pin) { return {pin.node, pin.last_page + 1}; }

  // Removes the last page of a leaf that holds it no more, and with it the node when it was its
  // only one. Returns the node that is now at that end: the same one, or its parent.
  PrefixNode* RemoveLastPage(PrefixNode* leaf);

  PrefixNode& root() { return *root_; }
  const PrefixNode& root() const { return *root_; }
  bool empty() const { return root_->is_leaf(); }
  size_t num_nodes() const { return num_nodes_; }  // Without the root.
  size_t num_pages() const { return num_pages_; }
  size_t held_pages() const { return held_pages_; }  // At or above a pin.

  // INTERNAL, naming the node and what does not hold.
  absl::Status CheckInvariants() const;

 private:
  static PrefixNode* FindChild(const PrefixNode& node, std::span<const uint32_t> first_page);
  // Makes a node of the first `pages` pages of `node`, above it.
  PrefixNode* SplitOffUpper(PrefixNode* node, uint32_t pages);
  void AddPins(PrefixNode* node, int change);

  std::unique_ptr<PrefixNode> root_;
  size_t num_nodes_ = 0;
  size_t num_pages_ = 0;
  size_t held_pages_ = 0;
};

}  // namespace crumb
