// SPDX-License-Identifier: Apache-2.0
#include "daemon/index/radix_tree.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>

#include "absl/hash/hash.h"
#include "absl/strings/str_cat.h"

#include "proto/base/check.h"

namespace crumb {
namespace {

constexpr size_t kPageBytes = kPageTokens * sizeof(uint32_t);

std::span<const uint32_t> PageOf(std::span<const uint32_t> tokens, uint32_t page) {
  return tokens.subspan(size_t{page} * kPageTokens, kPageTokens);
}

// How many whole pages the two begin with in common. One comparison a page, not one of all: it
// costs as little, and says where they part.
uint32_t CommonPages(std::span<const uint32_t> a, std::span<const uint32_t> b) {
  const size_t pages = std::min(a.size(), b.size()) / kPageTokens;
  uint32_t common = 0;
  while (common < pages && std::memcmp(a.data() + size_t{common} * kPageTokens,
                                       b.data() + size_t{common} * kPageTokens, kPageBytes) == 0) {
    ++common;
  }
  return common;
}

// Gives memory back when most of a vector is unused; moving what is left is paid for by what went.
template <typename T>
void ShrinkIfSparse(std::vector<T>* values) {
  if (values->size() < values->capacity() / 2) {
    values->shrink_to_fit();
  }
}

}  // namespace

size_t PrefixNode::FirstPageHash::operator()(std::span<const uint32_t> page) const {
  return absl::Hash<std::string_view>()({reinterpret_cast<const char*>(page.data()), kPageBytes});
}

size_t PrefixNode::FirstPageHash::operator()(const std::unique_ptr<PrefixNode>& node) const {
  return (*this)(node->first_page_tokens());
}

std::span<const uint32_t> PrefixNode::FirstPageEq::Page(const std::unique_ptr<PrefixNode>& node) {
  return node->first_page_tokens();
}

bool PrefixNode::FirstPageEq::Equal(std::span<const uint32_t> a, std::span<const uint32_t> b) {
  return std::memcmp(a.data(), b.data(), kPageBytes) == 0;
}

uint32_t PrefixNode::held_pages() const {
  if (subtree_pins_ > pins_.size()) {
    return num_pages();
  }
  return pins_.empty() ? 0 : pins_.back()->last_page + 1 - first_page_;
}

RadixTree::RadixTree() : root_(new PrefixNode) {}

RadixTree::~RadixTree() {
  // Leaf by leaf, because a chain of nodes may be deeper than the stack.
  PrefixNode* node = root_.get();
  while (node != nullptr) {
    if (!node->is_leaf()) {
      node = node->children_.begin()->get();
      continue;
    }
    PrefixNode* parent = node->parent_;
    if (parent != nullptr) {
      parent->children_.erase(parent->children_.find(node->first_page_tokens()));
    }
    node = parent;
  }
}

PrefixNode* RadixTree::FindChild(const PrefixNode& node, std::span<const uint32_t> first_page) {
  const auto child = node.children_.find(first_page);
  return child == node.children_.end() ? nullptr : child->get();
}

PrefixPosition RadixTree::Match(std::span<const uint32_t> tokens) const {
  PrefixPosition position{root_.get(), 0};
  const size_t whole_pages = tokens.size() / kPageTokens;
  while (position.pages < whole_pages) {
    PrefixNode* child = FindChild(*position.node, PageOf(tokens, position.pages));
    if (child == nullptr) {
      break;
    }
    const auto rest = tokens.subspan((size_t{position.pages} + 1) * kPageTokens);
    const auto run = std::span(child->tokens_).subspan(kPageTokens);
    position = {child, position.pages + 1 + CommonPages(run, rest)};
    if (position.pages < child->end_page()) {
      break;
    }
  }
  return position;
}

PrefixNode* RadixTree::SplitOffUpper(PrefixNode* node, uint32_t pages) {
  CRUMB_CHECK(pages >= 1 && pages < node->num_pages(), "split outside of the node");
  PrefixNode* parent = node->parent_;
  auto handle = parent->children_.extract(parent->children_.find(node->first_page_tokens()));
  std::unique_ptr<PrefixNode> self = std::move(handle.value());

  std::unique_ptr<PrefixNode> upper(new PrefixNode);
  const auto token_cut = static_cast<ptrdiff_t>(size_t{pages} * kPageTokens);
  const auto page_cut = static_cast<ptrdiff_t>(pages);
  upper->parent_ = parent;
  upper->first_page_ = node->first_page_;
  upper->tokens_.assign(node->tokens_.begin(), node->tokens_.begin() + token_cut);
  upper->pages_.assign(node->pages_.begin(), node->pages_.begin() + page_cut);
  node->tokens_ = std::vector<uint32_t>(node->tokens_.begin() + token_cut, node->tokens_.end());
  node->pages_ = std::vector<PageSlots>(node->pages_.begin() + page_cut, node->pages_.end());
  node->first_page_ += pages;

  // All pages of the upper part were used when its last one was.
  const uint32_t warm = node->warm_pages_;
  upper->last_use_ = warm >= pages ? node->warm_use_ : node->last_use_;
  upper->warm_use_ = node->warm_use_;
  upper->warm_pages_ = warm >= pages ? 0 : warm;
  node->warm_pages_ = warm > pages ? warm - pages : 0;
  upper->hits_ = node->hits_;

  upper->subtree_pins_ = node->subtree_pins_;
  const auto first_kept =
      std::find_if(node->pins_.begin(), node->pins_.end(),
                   [&](const auto& pin) { return pin->last_page >= node->first_page_; });
  for (auto pin = node->pins_.begin(); pin != first_kept; ++pin) {
    (*pin)->node = upper.get();
    upper->pins_.push_back(std::move(*pin));
  }
  node->pins_.erase(node->pins_.begin(), first_kept);
  node->subtree_pins_ -= static_cast<uint32_t>(upper->pins_.size());

  PrefixNode* result = upper.get();
  node->parent_ = result;
  result->children_.insert(std::move(self));
  parent->children_.insert(std::move(upper));
  ++num_nodes_;
  return result;
}

RadixTree::Extension RadixTree::Extend(std::span<const uint32_t> tokens, int64_t stamp) {
  CRUMB_CHECK(!tokens.empty() && tokens.size() % kPageTokens == 0, "not whole pages");
  PrefixPosition position = Match(tokens);
  Extension result{.end = position, .old_pages = position.pages, .split_off = nullptr};
  const auto num_new = static_cast<uint32_t>(tokens.size() / kPageTokens) - position.pages;
  if (num_new == 0) {
    Touch(position, stamp);
    return result;
  }
  if (position.pages < position.node->end_page()) {
    result.split_off = SplitOffUpper(position.node, position.pages - position.node->first_page());
    position.node = result.split_off;
  }
  const auto rest = tokens.subspan(size_t{position.pages} * kPageTokens);
  PrefixNode* node = position.node;
  if (node->is_root() || !node->is_leaf()) {
    std::unique_ptr<PrefixNode> child(new PrefixNode);
    child->parent_ = node;
    child->first_page_ = position.pages;
    child->tokens_.assign(rest.begin(), rest.end());
    child->pages_.resize(num_new);
    PrefixNode* raw = child.get();
    node->children_.insert(std::move(child));
    ++num_nodes_;
    node = raw;
  } else {
    // Nothing else follows this run, so it goes on: a conversation stays one node.
    node->tokens_.insert(node->tokens_.end(), rest.begin(), rest.end());
    node->pages_.resize(node->pages_.size() + num_new);
  }
  num_pages_ += num_new;
  result.end = {node, position.pages + num_new};
  Touch(result.end, stamp);
  return result;
}

absl::InlinedVector<PrefixNode*, 16> RadixTree::Path(PrefixPosition position) {
  absl::InlinedVector<PrefixNode*, 16> path;
  for (PrefixNode* node = position.node; node != nullptr && !node->is_root();
       node = node->parent_) {
    path.push_back(node);
  }
  std::reverse(path.begin(), path.end());
  return path;
}

PrefixNode* RadixTree::NodeOf(PrefixPosition position, uint32_t page_idx) {
  CRUMB_CHECK(page_idx < position.pages, "page beyond the prefix");
  PrefixNode* node = position.node;
  while (page_idx < node->first_page_) {
    node = node->parent_;
  }
  return node;
}

void RadixTree::Touch(PrefixPosition position, int64_t stamp) {
  PrefixNode* node = position.node;
  if (node == nullptr || node->is_root()) {
    return;
  }
  if (position.pages < node->end_page()) {
    // Two runs are all that is kept: a shorter use after a longer one makes the longer look warm.
    node->warm_pages_ = std::max(node->warm_pages_, position.pages - node->first_page_);
    node->warm_use_ = stamp;
    node = node->parent_;
  }
  for (; !node->is_root(); node = node->parent_) {
    node->last_use_ = stamp;
    node->warm_pages_ = 0;
  }
}

void RadixTree::TouchAsHit(PrefixPosition position, int64_t stamp) {
  Touch(position, stamp);
  for (PrefixNode* node = position.node; node != nullptr && !node->is_root();
       node = node->parent_) {
    ++node->hits_;
  }
}

void RadixTree::AddPins(PrefixNode* node, int change) {
  for (; node != nullptr; node = node->parent_) {
    held_pages_ -= node->held_pages();
    node->subtree_pins_ += static_cast<uint32_t>(change);
    held_pages_ += node->held_pages();
  }
}

PrefixPin* RadixTree::Pin(PrefixPosition position) {
  CRUMB_CHECK(position.pages >= 1 && !position.node->is_root(), "nothing to pin");
  PrefixNode* node = position.node;
  const uint32_t last_page = position.pages - 1;
  CRUMB_CHECK(last_page >= node->first_page_ && last_page < node->end_page(), "stale position");
  const auto place =
      std::lower_bound(node->pins_.begin(), node->pins_.end(), last_page,
                       [](const auto& pin, uint32_t page) { return pin->last_page < page; });
  if (place != node->pins_.end() && (*place)->last_page == last_page) {
    return PinAgain(place->get());
  }
  held_pages_ -= node->held_pages();
  PrefixPin* pin =
      node->pins_.insert(place, std::make_unique<PrefixPin>(PrefixPin{node, last_page, 1}))->get();
  ++node->subtree_pins_;
  held_pages_ += node->held_pages();
  AddPins(node->parent_, 1);
  return pin;
}

PrefixPin* RadixTree::PinAgain(PrefixPin* pin) {
  ++pin->count;
  return pin;
}

void RadixTree::Unpin(PrefixPin* pin) {
  CRUMB_CHECK(pin->count > 0, "pin of nobody");
  if (--pin->count > 0) {
    return;
  }
  PrefixNode* node = pin->node;
  const auto place = std::find_if(node->pins_.begin(), node->pins_.end(),
                                  [&](const auto& other) { return other.get() == pin; });
  CRUMB_CHECK(place != node->pins_.end(), "pin that its node does not know");
  held_pages_ -= node->held_pages();
  node->pins_.erase(place);
  --node->subtree_pins_;
  held_pages_ += node->held_pages();
  AddPins(node->parent_, -1);
}

PrefixNode* RadixTree::RemoveLastPage(PrefixNode* leaf) {
  CRUMB_CHECK(leaf->is_leaf() && !leaf->is_root(), "only leaves lose pages");
  CRUMB_CHECK(!leaf->IsHeld(leaf->end_page() - 1), "a held page must stay");
  --num_pages_;
  if (leaf->num_pages() > 1) {
    leaf->pages_.pop_back();
    leaf->tokens_.resize(leaf->tokens_.size() - kPageTokens);
    leaf->warm_pages_ = std::min(leaf->warm_pages_, leaf->num_pages());
    ShrinkIfSparse(&leaf->pages_);
    ShrinkIfSparse(&leaf->tokens_);
    return leaf;
  }
  PrefixNode* parent = leaf->parent_;
  parent->children_.erase(parent->children_.find(leaf->first_page_tokens()));
  --num_nodes_;
  return parent;
}

absl::Status RadixTree::CheckInvariants() const {
  size_t nodes = 0;
  size_t pages = 0;
  size_t held = 0;
  std::vector<const PrefixNode*> stack{root_.get()};
  while (!stack.empty()) {
    const PrefixNode& node = *stack.back();
    stack.pop_back();
    const auto fail = [&](absl::string_view what) {
      return absl::InternalError(absl::StrCat("index: node at page ", node.first_page_, " with ",
                                              node.num_pages(), " pages: ", what));
    };
    if (node.tokens_.size() != size_t{node.num_pages()} * kPageTokens) {
      return fail("another number of tokens than its pages have");
    }
    if (!node.is_root() && node.num_pages() == 0) {
      return fail("no pages");
    }
    uint32_t pins = static_cast<uint32_t>(node.pins_.size());
    for (const auto& child : node.children_) {
      if (child->parent_ != &node || child->first_page_ != node.end_page()) {
        return fail("a child that is not its own, or does not follow it");
      }
      if (!node.is_root() && child->LastUse(child->first_page_) > node.last_use_) {
        return fail("a child used later than its parent");
      }
      pins += child->subtree_pins_;
      stack.push_back(child.get());
    }
    if (pins != node.subtree_pins_) {
      return fail("another number of pins below than it counts");
    }
    for (const auto& pin : node.pins_) {
      if (pin->node != &node || pin->count == 0 || pin->last_page < node.first_page_ ||
          pin->last_page >= node.end_page()) {
        return fail("a pin that is not on its pages");
      }
    }
    nodes += node.is_root() ? 0u : 1u;
    pages += node.num_pages();
    held += node.held_pages();
  }
  if (nodes != num_nodes_ || pages != num_pages_ || held != held_pages_) {
    return absl::InternalError(absl::StrCat("index: counts ", num_nodes_, " nodes, ", num_pages_,
                                            " pages, ", held_pages_, " held; has ", nodes, ", ",
                                            pages, ", ", held));
  }
  return absl::OkStatus();
}

}  // namespace crumb
