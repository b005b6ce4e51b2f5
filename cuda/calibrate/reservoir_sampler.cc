// SPDX-License-Identifier: Apache-2.0
#include "cuda/calibrate/reservoir_sampler.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "crumb/cuda/statistics.h"
#include "cuda/calibrate/attention_mass.h"
#include "proto/base/check.h"

namespace crumb::calibrate {
namespace {

// SplitMix64's finaliser (Steele, Lea and Flood, "Fast splittable pseudorandom number generators").
uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

enum class Draw : uint64_t { kTexts = 1, kKeys = 2, kQueries = 3 };

uint64_t Priority(uint64_t seed, Draw draw, uint32_t text, uint32_t position) {
  return Mix(Mix(Mix(seed + static_cast<uint64_t>(draw)) + text) + position);
}

// The `count` positions of [first, end) of least priority, by priority.
std::vector<uint32_t> LeastPositions(
    uint64_t seed, Draw draw, uint32_t text, size_t first, size_t end, size_t count) {
  std::vector<std::pair<uint64_t, uint32_t>> all;
  for (auto position = static_cast<uint32_t>(first); position < end; ++position) {
    all.emplace_back(Priority(seed, draw, text, position), position);
  }
  std::ranges::sort(all);
  all.resize(std::min(all.size(), count));
  std::vector<uint32_t> positions(all.size());
  std::ranges::transform(all, positions.begin(), &std::pair<uint64_t, uint32_t>::second);
  return positions;
}

void Append(std::span<const float> from, std::vector<float>* to) {
  to->insert(to->end(), from.begin(), from.end());
}

// Indices of `positions` in ascending order of what is there.
std::vector<size_t> Ascending(const std::vector<uint32_t>& positions) {
  std::vector<size_t> order(positions.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::sort(order, {}, [&](size_t i) { return positions[i]; });
  return order;
}

// Appends head `head`'s rows of [num_rows, num_heads, dim] in this order.
void AppendRows(const std::vector<float>& rows,
                const std::vector<size_t>& order,
                size_t num_heads,
                size_t head,
                std::vector<float>* to) {
  const size_t dim = order.empty() ? 0 : rows.size() / (order.size() * num_heads);
  for (const size_t row : order) {
    Append(std::span(rows).subspan((row * num_heads + head) * dim, dim), to);
  }
}

// One layer's rows in a reservoir.
struct LayerRows {
  const std::vector<float>& all;  // [num_layers, num_heads, num_rows, dim]
  size_t layer;
  size_t num_heads;
  size_t num_rows;
  size_t dim;
};

// Appends them in this order, [order.size(), num_heads, dim].
void TakeRows(const LayerRows& rows, const std::vector<size_t>& order, std::vector<float>* to) {
  for (const size_t row : order) {
    for (size_t head = 0; head < rows.num_heads; ++head) {
      const size_t block = rows.layer * rows.num_heads + head;
      Append(std::span(rows.all).subspan((block * rows.num_rows + row) * rows.dim, rows.dim), to);
    }
  }
}

// Where the tokens of `text` are in `tokens`, by priority.
std::vector<size_t> ByPriority(const std::vector<Reservoir::Token>& tokens,
                               uint32_t text,
                               uint64_t seed,
                               Draw draw) {
  std::vector<std::pair<uint64_t, size_t>> found;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i].text == text) {
      found.emplace_back(Priority(seed, draw, text, tokens[i].position), i);
    }
  }
  std::ranges::sort(found);
  std::vector<size_t> indices;
  indices.reserve(found.size());
  for (const auto& [priority, index] : found) {
    indices.push_back(index);
  }
  return indices;
}

// Cuts [num_rows, ...] to its first `count` rows.
template <typename T>
void Cut(size_t num_rows, size_t count, std::vector<T>* rows) {
  rows->resize(num_rows == 0 ? 0 : rows->size() / num_rows * count);
}

}  // namespace

void ReservoirSampler::AddText(uint32_t text,
                               const TokenRows& queries,
                               const TokenRows& keys,
                               const TokenRows& values) {
  const size_t num_tokens = keys.num_tokens();
  CRUMB_CHECK(num_tokens > Statistics::kFirstQueryToken, "a text without queries");
  CRUMB_CHECK(num_kv_heads_ == 0 || num_kv_heads_ == keys.num_heads, "a text of another model");
  num_kv_heads_ = keys.num_heads;
  KeptText kept;
  kept.text = text;
  kept.priority = Priority(seed_, Draw::kTexts, text, 0);
  if (kept_.size() == Reservoir::kMaxTexts) {
    const auto last = std::ranges::max_element(kept_, {}, &KeptText::priority);
    if (last->priority < kept.priority) {
      return;
    }
    kept_.erase(last);
  }
  const size_t share = kept_.size() + 1;
  kept.key_positions = LeastPositions(seed_, Draw::kKeys, text, Statistics::kFirstKeyToken,
                                      num_tokens, Reservoir::kKeyRows / share);
  const size_t first_query = std::max<size_t>(Statistics::kFirstQueryToken, num_tokens / 2);
  kept.query_positions = LeastPositions(seed_, Draw::kQueries, text, first_query, num_tokens,
                                        Reservoir::kQueryRows / share);
  for (const uint32_t position : kept.key_positions) {
    for (size_t head = 0; head < num_kv_heads_; ++head) {
      Append(keys.Row(position, head), &kept.keys);
      Append(values.Row(position, head), &kept.values);
    }
  }
  const size_t group = queries.num_heads / num_kv_heads_;
  std::vector<float> output(values.dim);
  for (const uint32_t position : kept.query_positions) {
    for (size_t head = 0; head < num_kv_heads_; ++head) {
      const auto query = queries.Row(position, head * group + position % group);
      kept.lse.push_back(Attend(query, position, window_, ViewHead(keys, head, 0),
                                ViewHead(values, head, 0), output));
      Append(query, &kept.queries);
      Append(output, &kept.outputs);
    }
  }
  kept_.insert(std::ranges::upper_bound(kept_, text, {}, &KeptText::text), std::move(kept));
  std::ranges::for_each(kept_, [this](KeptText& one) { Trim(&one); });
}

void ReservoirSampler::Restore(const Reservoir& reservoir, size_t layer, size_t num_kv_heads) {
  CRUMB_CHECK(kept_.empty(), "a sampler that has seen texts");
  if (reservoir.empty()) {
    return;
  }
  num_kv_heads_ = num_kv_heads;
  const size_t num_keys = reservoir.key_tokens.size();
  const size_t num_queries = reservoir.query_tokens.size();
  const size_t layer_heads = reservoir.lse.size() / num_queries;  // Of all layers.
  const auto rows = [&](const std::vector<float>& all, size_t num_rows) {
    return LayerRows{all, layer, num_kv_heads, num_rows, all.size() / (layer_heads * num_rows)};
  };
  for (const Reservoir::Token& token : reservoir.query_tokens) {
    if (!kept_.empty() && kept_.back().text == token.text) {
      continue;  // Tokens are in order of their texts.
    }
    KeptText kept;
    kept.text = token.text;
    kept.priority = Priority(seed_, Draw::kTexts, token.text, 0);
    const auto key_order = ByPriority(reservoir.key_tokens, token.text, seed_, Draw::kKeys);
    const auto query_order = ByPriority(reservoir.query_tokens, token.text, seed_, Draw::kQueries);
    for (const size_t i : key_order) {
      kept.key_positions.push_back(reservoir.key_tokens[i].position);
    }
    for (const size_t i : query_order) {
      kept.query_positions.push_back(reservoir.query_tokens[i].position);
    }
    TakeRows(rows(reservoir.keys, num_keys), key_order, &kept.keys);
    TakeRows(rows(reservoir.values, num_keys), key_order, &kept.values);
    TakeRows(rows(reservoir.queries, num_queries), query_order, &kept.queries);
    TakeRows(rows(reservoir.outputs, num_queries), query_order, &kept.outputs);
    TakeRows(rows(reservoir.lse, num_queries), query_order, &kept.lse);
    kept_.push_back(std::move(kept));
  }
}

// To the share of a text among those that are kept.
void ReservoirSampler::Trim(KeptText* kept) const {
  const size_t num_keys = kept->key_positions.size();
  const size_t key_rows = std::min(num_keys, Reservoir::kKeyRows / kept_.size());
  Cut(num_keys, key_rows, &kept->keys);
  Cut(num_keys, key_rows, &kept->values);
  kept->key_positions.resize(key_rows);
  const size_t num_queries = kept->query_positions.size();
  const size_t query_rows = std::min(num_queries, Reservoir::kQueryRows / kept_.size());
  Cut(num_queries, query_rows, &kept->queries);
  Cut(num_queries, query_rows, &kept->outputs);
  Cut(num_queries, query_rows, &kept->lse);
  kept->query_positions.resize(query_rows);
}

bool ReservoirSampler::AppendTo(Reservoir* out) const {
  std::vector<Reservoir::Token> key_tokens;
  std::vector<Reservoir::Token> query_tokens;
  for (const KeptText& kept : kept_) {
    for (const size_t row : Ascending(kept.key_positions)) {
      key_tokens.push_back({kept.text, kept.key_positions[row]});
    }
    for (const size_t row : Ascending(kept.query_positions)) {
      query_tokens.push_back({kept.text, kept.query_positions[row]});
    }
  }
  if (out->empty()) {
    out->key_tokens = key_tokens;
    out->query_tokens = query_tokens;
  }
  if (out->key_tokens != key_tokens || out->query_tokens != query_tokens) {
    return false;
  }
  for (size_t head = 0; head < num_kv_heads_; ++head) {
    for (const KeptText& kept : kept_) {
      const std::vector<size_t> key_order = Ascending(kept.key_positions);
      const std::vector<size_t> query_order = Ascending(kept.query_positions);
      AppendRows(kept.keys, key_order, num_kv_heads_, head, &out->keys);
      AppendRows(kept.values, key_order, num_kv_heads_, head, &out->values);
      AppendRows(kept.queries, query_order, num_kv_heads_, head, &out->queries);
      AppendRows(kept.outputs, query_order, num_kv_heads_, head, &out->outputs);
      AppendRows(kept.lse, query_order, num_kv_heads_, head, &out->lse);
    }
  }
  return true;
}

}  // namespace crumb::calibrate
