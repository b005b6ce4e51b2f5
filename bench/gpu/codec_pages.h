// SPDX-License-Identifier: Apache-2.0
//
// What the page ops' benchmarks work on: a model's profile with plausible numbers, and pages of
// random rows in device memory, as images [kv_head][layer].
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "crumb/cuda/append_rows.h"
#include "crumb/cuda/checksum_pages.h"
#include "crumb/cuda/demote_pages.h"
#include "crumb/cuda/expand_pages.h"
#include "crumb/cuda/prefill_attention.h"
#include "proto/page/geometry.h"

namespace crumb::bench {

class CodecPages {
 public:
  CodecPages(const Geometry& geometry, CodecId codec, uint32_t num_pages);
  ~CodecPages();
  CodecPages(const CodecPages&) = delete;
  CodecPages& operator=(const CodecPages&) = delete;

  const Geometry& geometry() const { return geometry_; }
  const DeviceHeads& heads() const { return profile_->heads(); }
  uint32_t num_pages() const { return num_pages_; }
  DemotePagesParams Demotion() const;
  // Into page images of BF16 head blocks, as a cache of blocks of 64 tokens.
  ExpandPagesParams Expansion() const;
  ChecksumPagesParams Checksum() const;
  // One token of each of `num_sequences` sequences, 4 query heads a KV head.
  AppendRowsParams Append(uint32_t layer, uint32_t num_sequences) const;
  // `num_queries` tokens over a prefix of num_pages INT2 pages; their own rows, and a sink before
  // them, are of the BF16 pages.
  PrefillAttentionParams Prefill(uint32_t layer, uint32_t num_queries) const;

  double Bf16Bytes() const;
  double Int2Bytes() const;

 private:
  const Geometry geometry_;
  const uint32_t num_pages_;
  std::unique_ptr<DeviceProfile> profile_;
  std::byte* bf16_ = nullptr;
  std::byte* int2_ = nullptr;
  std::byte** tables_ = nullptr;    // [2, num_pages]: of bf16_, of int2_.
  std::byte** layers_ = nullptr;    // [num_layers]: of bf16_.
  int32_t* block_table_ = nullptr;  // [num_pages]: 0, 1, ....
  uint32_t* checksums_ = nullptr;   // [num_pages, num_kv_heads]
  std::byte* rows_ = nullptr;       // For Append: Q, K, V and rotated Q.
  uint32_t* slots_ = nullptr;
  uint64_t* finding_ = nullptr;
};

}  // namespace crumb::bench
