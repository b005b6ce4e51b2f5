// SPDX-License-Identifier: Apache-2.0
//
// A few rows of a model's attention as they were, beside its moments: enough of them that a recipe
// can be measured on real keys, values and queries instead of drawn ones.
//
// Which tokens: up to kMaxTexts texts, each alike likely; in them kKeyRows keys in all, alike
// likely among the tokens from Statistics::kFirstKeyToken on, and kQueryRows queries, alike likely
// among the tokens of the text's second half. The same tokens for all layers and heads.
// StatisticsCollector draws by the priority of a hash of (seed, text, position) and keeps the
// least, so the sample does not depend on the order of texts, samples of disjoint texts merge by
// keeping the least again, and memory does not grow with texts; another collector may draw
// otherwise.
//
// A query comes with the logarithm of its softmax's sum and with its output, over all keys that it
// saw. So exp(q . k / sqrt(dk) - lse) is the true probability of any key of its text, and a sample
// of N' of N keys stands for them all, each N / N' times.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace crumb {

struct Reservoir {
  static constexpr uint32_t kMaxTexts = 4;
  static constexpr uint32_t kKeyRows = 512;
  static constexpr uint32_t kQueryRows = 128;

  struct Token {
    uint32_t text = 0;      // Which, counted as they were collected.
    uint32_t position = 0;  // In its text.

    bool operator==(const Token&) const = default;
    bool operator<(const Token& other) const {
      return text != other.text ? text < other.text : position < other.position;
    }
  };

  // Ascending, none twice. Rk and Rq of them; both empty: no rows were kept.
  std::vector<Token> key_tokens;
  std::vector<Token> query_tokens;
  std::vector<float> keys;    // [L, H, Rk, dk], after RoPE
  std::vector<float> values;  // [L, H, Rk, dv]
  // Of query head `kv_head * group + position % group`, group the query heads that share a KV head.
  std::vector<float> queries;  // [L, H, Rq, dk], after RoPE
  std::vector<float> outputs;  // [L, H, Rq, dv]: the head's attention output, before any projection
  std::vector<float> lse;      // [L, H, Rq]: log(sum over keys of exp(q . k / sqrt(dk)))

  bool empty() const { return key_tokens.empty(); }
};

}  // namespace crumb
