// SPDX-License-Identifier: Apache-2.0
//
// A batch of sequences with split caches, in host memory, and what attention over it must give by
// plain sums in double. The sums are taken over the numbers that the scene was made of, not over
// its bytes, so they do not share the page format with what is tested.
#pragma once

#include <cstdint>
#include <memory>
#include <ostream>
#include <random>
#include <vector>

#include "crumb/cuda/decode_params.h"
#include "proto/page/geometry.h"

namespace crumb {

struct SceneLength {
  uint32_t pages = 0;   // Of history.
  uint32_t tokens = 0;  // Of the windows.
};

struct SceneShape {
  uint32_t head_dim = 64;
  uint32_t num_kv_heads = 2;
  uint32_t group = 1;
  std::vector<SceneLength> lengths = {};
  ElementType query_type = ElementType::kBf16;
  float query_deviation = 2;  // Scores then differ by a few.
  // The first pages of every sequence's history are these of sequence 0.
  uint32_t shared_pages = 0;
  // Of INT2 rows, what they are multiplied by; their scales and minima saturate as a page's do.
  float key_size = 1;
  float value_size = 1;
  // Token 5 of every INT2 page has values 4096 times as large as others, and no query looks for it.
  bool has_huge_row = false;
  // Instead of random rows: query head x of a KV head finds the tokens t of a page with t %
  // head_dim
  // == x + 1 and nothing else, and their values are t + 64 * (sequence * num_kv_heads + KV head).
  bool planted = false;
  uint32_t seed = 1;
};
void PrintTo(const SceneShape& shape, std::ostream* out);

class DecodeScene {
 public:
  // A page image has two layers; the scene is the second.
  static constexpr uint32_t kLayers = 2;
  static constexpr uint32_t kLayer = 1;

  explicit DecodeScene(const SceneShape& shape);

  const SceneShape& shape() const { return shape_; }
  const Geometry& geometry() const { return geometry_; }
  uint32_t num_sequences() const { return static_cast<uint32_t>(shape_.lengths.size()); }
  uint32_t num_query_heads() const { return shape_.num_kv_heads * shape_.group; }
  size_t num_rows() const { return size_t{num_sequences()} * num_query_heads(); }

  // Page images in one run of memory each, not in the order of the tables. Bytes that no sequence
  // has rows in are 0xff: a NaN wherever they would be read.
  const std::vector<std::byte>& int2_arena() const { return int2_arena_; }
  const std::vector<std::byte>& bf16_arena() const { return bf16_arena_; }
  // [num_sequences, stride] for arenas that lie at `base`; null beyond a sequence's pages.
  std::vector<const std::byte*> HistoryTable(const std::byte* base) const;
  std::vector<const std::byte*> WindowTable(const std::byte* base) const;
  std::vector<uint32_t> HistoryPages() const;
  std::vector<uint32_t> WindowTokens() const;
  const std::vector<uint16_t>& queries() const { return queries_; }  // Bits of shape().query_type.

  // Everything but pointers; outputs in f32.
  SplitDecodeParams Params() const;

  struct Result {
    std::vector<float> out;  // [num_rows, head_dim]
    std::vector<float> lse;  // [num_rows]
  };
  // By plain sums in double.
  Result Expected() const;

 private:
  struct Page {
    size_t slot = 0;  // In its arena.
    uint32_t tokens = 0;
    std::vector<std::vector<double>> keys;    // A KV head: [tokens, head_dim].
    std::vector<std::vector<double>> values;  // As keys.
  };
  Page MakePage(PageEncoding encoding, uint32_t tokens, uint32_t sequence, std::byte* image);
  void MakeRow(uint32_t token, uint32_t pair, double* key, double* value);
  struct RowMeta {
    float scale;
    float min;
  };
  RowMeta MakeMeta(bool is_key, uint32_t token, float level);
  void PackInt2Row(std::byte* block, uint32_t token, double* key, double* value);
  void PackBf16Row(std::byte* block, uint32_t token, double* key, double* value) const;
  void MakeQueries();
  double QueryAt(size_t index) const;
  std::vector<const std::byte*> Table(const std::vector<std::vector<const Page*>>& pages,
                                      PageEncoding encoding,
                                      const std::byte* base) const;
  void AttendHead(uint32_t sequence, uint32_t query_head, float* out, float* lse) const;

  SceneShape shape_;
  Geometry geometry_;
  std::mt19937 random_;
  std::vector<std::byte> int2_arena_;
  std::vector<std::byte> bf16_arena_;
  std::vector<std::unique_ptr<Page>> all_pages_;
  std::vector<std::vector<const Page*>> history_;  // By sequence.
  std::vector<std::vector<const Page*>> windows_;
  std::vector<uint16_t> queries_;
};

// The largest difference between what was got and what was expected, relative to the largest value
// expected; infinite if a NaN was got.
double WorstError(const std::vector<float>& got, const std::vector<float>& expected);

}  // namespace crumb
