// SPDX-License-Identifier: Apache-2.0
#include "tests/cuda/gpu/decode_scene.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "proto/base/bfloat16.h"
#include "proto/base/float16.h"
#include "proto/page/page_format.h"

namespace crumb {
namespace {

uint32_t WindowPages(uint32_t tokens) {
  return (tokens + kPageTokens - 1) / kPageTokens;
}

}  // namespace

void PrintTo(const SceneShape& shape, std::ostream* out) {
  *out << "dim " << shape.head_dim << " KV heads " << shape.num_kv_heads << " group " << shape.group
       << " sizes " << shape.key_size << " " << shape.value_size
       << (shape.query_type == ElementType::kBf16 ? " bf16" : " fp16") << " seed " << shape.seed
       << " pages+tokens";
  for (size_t i = 0; i < std::min<size_t>(shape.lengths.size(), 8); ++i) {
    *out << " " << shape.lengths[i].pages << "+" << shape.lengths[i].tokens;
  }
  *out << (shape.lengths.size() > 8 ? " ..." : "");
}

DecodeScene::DecodeScene(const SceneShape& shape)
    : shape_(shape),
      geometry_{kLayers, shape.num_kv_heads, shape.head_dim, shape.head_dim},
      random_(shape.seed) {
  size_t num_int2 = 0;
  size_t num_bf16 = 0;
  for (const SceneLength& length : shape.lengths) {
    num_int2 += length.pages;
    num_bf16 += WindowPages(length.tokens);
  }
  const size_t int2_bytes = geometry_.PageBytes(PageEncoding::kInt2);
  const size_t bf16_bytes = geometry_.PageBytes(PageEncoding::kBf16);
  int2_arena_.assign((num_int2 + 1) * int2_bytes, std::byte{0xff});
  bf16_arena_.assign((num_bf16 + 1) * bf16_bytes, std::byte{0xff});
  std::vector<size_t> int2_slots(num_int2 + 1);
  std::vector<size_t> bf16_slots(num_bf16 + 1);
  std::iota(int2_slots.begin(), int2_slots.end(), 0);
  std::iota(bf16_slots.begin(), bf16_slots.end(), 0);
  std::shuffle(int2_slots.begin(), int2_slots.end(), random_);
  std::shuffle(bf16_slots.begin(), bf16_slots.end(), random_);
  const auto add = [&](PageEncoding encoding, uint32_t tokens, uint32_t sequence) {
    const bool is_int2 = encoding == PageEncoding::kInt2;
    auto& slots = is_int2 ? int2_slots : bf16_slots;
    std::byte* image =
        is_int2 ? &int2_arena_[slots.back() * int2_bytes] : &bf16_arena_[slots.back() * bf16_bytes];
    all_pages_.push_back(std::make_unique<Page>(MakePage(encoding, tokens, sequence, image)));
    all_pages_.back()->slot = slots.back();
    slots.pop_back();
    return all_pages_.back().get();
  };
  for (uint32_t sequence = 0; sequence < num_sequences(); ++sequence) {
    const SceneLength& length = shape.lengths[sequence];
    auto& history = history_.emplace_back();
    for (uint32_t page = 0; page < length.pages; ++page) {
      const bool is_shared = sequence > 0 && page < shape.shared_pages;
      history.push_back(is_shared ? history_[0][page]
                                  : add(PageEncoding::kInt2, kPageTokens, sequence));
    }
    auto& windows = windows_.emplace_back();
    for (uint32_t page = 0; page < WindowPages(length.tokens); ++page) {
      const uint32_t tokens = std::min(length.tokens - page * kPageTokens, kPageTokens);
      windows.push_back(add(PageEncoding::kBf16, tokens, sequence));
    }
  }
  MakeQueries();
}

DecodeScene::Page DecodeScene::MakePage(PageEncoding encoding,
                                        uint32_t tokens,
                                        uint32_t sequence,
                                        std::byte* image) {
  Page page;
  page.tokens = tokens;
  const size_t dim = shape_.head_dim;
  for (uint32_t head = 0; head < shape_.num_kv_heads; ++head) {
    std::byte* block = image + geometry_.HeadBlockOffset(encoding, kLayer, head);
    if (encoding == PageEncoding::kInt2) {
      std::fill_n(block, geometry_.HeadBlockBytes(encoding), std::byte{0});
    }
    auto& keys = page.keys.emplace_back(tokens * dim);
    auto& values = page.values.emplace_back(tokens * dim);
    for (uint32_t token = 0; token < tokens; ++token) {
      double* key = &keys[token * dim];
      double* value = &values[token * dim];
      if (shape_.planted) {
        MakeRow(token, sequence * shape_.num_kv_heads + head, key, value);
      } else {  // A level of its own for every pair: a swapped head or sequence shows.
        std::fill_n(value, dim, ((sequence * 5 + head * 3) % 7) - 3.0);
      }
      if (encoding == PageEncoding::kInt2) {
        PackInt2Row(block, token, key, value);
      } else {
        PackBf16Row(block, token, key, value);
      }
    }
  }
  return page;
}

void DecodeScene::MakeRow(uint32_t token, uint32_t pair, double* key, double* value) {
  std::fill_n(key, shape_.head_dim, 0.0);
  key[token % shape_.head_dim] = 3;
  std::fill_n(value, shape_.head_dim, token + 64.0 * pair);
}

DecodeScene::RowMeta DecodeScene::MakeMeta(bool is_key, uint32_t token, float level) {
  if (shape_.planted) {
    return is_key ? RowMeta{1, 0} : RowMeta{0, level};
  }
  std::uniform_real_distribution<float> uniform(0, 1);
  float size = is_key ? shape_.key_size : shape_.value_size;
  const float scale = 0.2f + 0.8f * uniform(random_);
  const float min = level - 1.5f * scale * (0.8f + 0.4f * uniform(random_));
  if (shape_.has_huge_row && token == 5) {
    if (is_key) {
      return {Float16::kMinPositive, -4 * size};
    }
    size *= 4096;
  }
  return {std::max(scale * size, Float16::kMinPositive), min * size};
}

// Writes the row and leaves in `key` and `value` what it then is. A planted row comes in `key`;
// `value` is the level of the row.
void DecodeScene::PackInt2Row(std::byte* block, uint32_t token, double* key, double* value) {
  const Int2HeadBlock format = geometry_.Int2Block();
  const auto pack = [&](bool is_key, double level) {
    double* row = is_key ? key : value;
    const auto [scale, min] = MakeMeta(is_key, token, static_cast<float>(level));
    const Float16 meta[2] = {Float16::FromFloatSaturated(scale), Float16::FromFloatSaturated(min)};
    std::memcpy(block + (is_key ? format.KeyMetaByte(token) : format.ValueMetaByte(token)), meta,
                sizeof(meta));
    for (uint32_t channel = 0; channel < shape_.head_dim; ++channel) {
      const uint32_t code =
          shape_.planted && is_key ? static_cast<uint32_t>(row[channel]) : random_() % 4;
      const CodePosition at =
          is_key ? format.KeyCode(token, channel) : format.ValueCode(token, channel);
      block[at.byte] |= static_cast<std::byte>(code << at.shift);
      row[channel] = double{meta[0].ToFloat()} * code + double{meta[1].ToFloat()};
    }
  };
  pack(true, 0);
  pack(false, value[0]);
}

void DecodeScene::PackBf16Row(std::byte* block, uint32_t token, double* key, double* value) const {
  const Bf16HeadBlock format = geometry_.Bf16Block();
  std::mt19937 random(shape_.seed * 31 + token);
  std::normal_distribution<double> normal(0, 0.7);
  const size_t dim = shape_.head_dim;
  for (size_t channel = 0; channel < dim; ++channel) {
    const auto pack = [&](double* row, size_t offset, double number) {
      const BFloat16 bits = BFloat16::FromFloat(static_cast<float>(number));
      std::memcpy(block + offset + (token * dim + channel) * 2, &bits, 2);
      row[channel] = double{bits.ToFloat()};
    };
    pack(key, format.key_offset(), shape_.planted ? key[channel] : normal(random));
    pack(value, format.value_offset(), value[channel] + (shape_.planted ? 0 : normal(random)));
  }
}

void DecodeScene::MakeQueries() {
  const size_t dim = shape_.head_dim;
  std::normal_distribution<float> normal(0, shape_.query_deviation);
  queries_.resize(num_rows() * dim);
  for (size_t i = 0; i < queries_.size(); ++i) {
    const size_t head_of_group = i / dim % shape_.group;
    float number = normal(random_) * static_cast<float>(1 + head_of_group % 3) / 2;
    if (shape_.has_huge_row) {  // Its key has the sign that this makes unwanted.
      number += 1;
    }
    if (shape_.planted) {
      const bool is_wanted = i % dim == (head_of_group + 1) % dim;
      number = is_wanted ? 16 * std::sqrt(static_cast<float>(dim)) : 0;
    }
    queries_[i] = shape_.query_type == ElementType::kBf16 ? BFloat16::FromFloat(number).bits
                                                          : Float16::FromFloat(number).bits;
  }
}

double DecodeScene::QueryAt(size_t index) const {
  return shape_.query_type == ElementType::kBf16 ? double{BFloat16{queries_[index]}.ToFloat()}
                                                 : double{Float16{queries_[index]}.ToFloat()};
}

std::vector<const std::byte*> DecodeScene::Table(const std::vector<std::vector<const Page*>>& pages,
                                                 PageEncoding encoding,
                                                 const std::byte* base) const {
  size_t stride = 0;
  for (const auto& of_sequence : pages) {
    stride = std::max(stride, of_sequence.size());
  }
  std::vector<const std::byte*> table(pages.size() * stride, nullptr);
  for (size_t sequence = 0; sequence < pages.size(); ++sequence) {
    for (size_t page = 0; page < pages[sequence].size(); ++page) {
      table[sequence * stride + page] =
          base + pages[sequence][page]->slot * geometry_.PageBytes(encoding);
    }
  }
  return table;
}

std::vector<const std::byte*> DecodeScene::HistoryTable(const std::byte* base) const {
  return Table(history_, PageEncoding::kInt2, base);
}
std::vector<const std::byte*> DecodeScene::WindowTable(const std::byte* base) const {
  return Table(windows_, PageEncoding::kBf16, base);
}

std::vector<uint32_t> DecodeScene::HistoryPages() const {
  std::vector<uint32_t> counts;
  for (const SceneLength& length : shape_.lengths) {
    counts.push_back(length.pages);
  }
  return counts;
}
std::vector<uint32_t> DecodeScene::WindowTokens() const {
  std::vector<uint32_t> counts;
  for (const SceneLength& length : shape_.lengths) {
    counts.push_back(length.tokens);
  }
  return counts;
}

SplitDecodeParams DecodeScene::Params() const {
  SplitDecodeParams params;
  params.num_sequences = num_sequences();
  params.num_query_heads = num_query_heads();
  params.num_kv_heads = shape_.num_kv_heads;
  params.head_dim = shape_.head_dim;
  params.scale = 1 / std::sqrt(static_cast<float>(shape_.head_dim));
  params.query_type = shape_.query_type;
  params.out_type = ElementType::kFloat32;
  for (const SceneLength& length : shape_.lengths) {
    params.history.stride = std::max(params.history.stride, length.pages);
    params.windows.stride = std::max(params.windows.stride, WindowPages(length.tokens));
  }
  params.history.block_offset = geometry_.HeadBlockOffset(PageEncoding::kInt2, kLayer, 0);
  params.history.head_stride = geometry_.HeadRangeBytes(PageEncoding::kInt2);
  params.windows.block_offset = geometry_.HeadBlockOffset(PageEncoding::kBf16, kLayer, 0);
  params.windows.head_stride = geometry_.HeadRangeBytes(PageEncoding::kBf16);
  return params;
}

void DecodeScene::AttendHead(uint32_t sequence, uint32_t query_head, float* out, float* lse) const {
  const size_t dim = shape_.head_dim;
  const uint32_t head = query_head / shape_.group;
  const size_t query = (size_t{sequence} * num_query_heads() + query_head) * dim;
  const double scale = double{1 / std::sqrt(static_cast<float>(dim))};
  std::vector<double> scores;
  std::vector<const double*> values;
  for (const auto* pages : {&history_[sequence], &windows_[sequence]}) {
    for (const Page* page : *pages) {
      for (uint32_t token = 0; token < page->tokens; ++token) {
        double score = 0;
        for (size_t channel = 0; channel < dim; ++channel) {
          score += QueryAt(query + channel) * page->keys[head][token * dim + channel];
        }
        scores.push_back(score * scale);
        values.push_back(&page->values[head][token * dim]);
      }
    }
  }
  std::vector<double> sums(dim, 0.0);
  double total = 0;
  const double highest = scores.empty() ? 0.0 : *std::max_element(scores.begin(), scores.end());
  for (size_t i = 0; i < scores.size(); ++i) {
    const double weight = std::exp(scores[i] - highest);
    total += weight;
    for (size_t channel = 0; channel < dim; ++channel) {
      sums[channel] += weight * values[i][channel];
    }
  }
  for (size_t channel = 0; channel < dim; ++channel) {
    out[channel] = scores.empty() ? 0.0f : static_cast<float>(sums[channel] / total);
  }
  *lse = scores.empty() ? -std::numeric_limits<float>::infinity()
                        : static_cast<float>(highest + std::log(total));
}

DecodeScene::Result DecodeScene::Expected() const {
  Result result;
  result.out.resize(num_rows() * shape_.head_dim);
  result.lse.resize(num_rows());
  for (uint32_t sequence = 0; sequence < num_sequences(); ++sequence) {
    for (uint32_t head = 0; head < num_query_heads(); ++head) {
      const size_t row = size_t{sequence} * num_query_heads() + head;
      AttendHead(sequence, head, &result.out[row * shape_.head_dim], &result.lse[row]);
    }
  }
  return result;
}

double WorstError(const std::vector<float>& got, const std::vector<float>& expected) {
  double largest = 1e-9;
  double worst = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    if (got[i] == expected[i]) {  // Infinities too.
      continue;
    }
    const double error = std::fabs(double{got[i]} - double{expected[i]});
    if (!std::isfinite(error)) {
      return std::numeric_limits<double>::infinity();
    }
    worst = std::max(worst, error);
    largest = std::max(largest, std::fabs(double{expected[i]}));
  }
  return worst / largest;
}

}  // namespace crumb
