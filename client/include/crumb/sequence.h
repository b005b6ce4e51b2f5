// SPDX-License-Identifier: Apache-2.0
//
// The KV cache of one live sequence in an engine: sink | history | recent. New rows enter as BF16;
// a page that has left the recent window is demoted to two bits; attention runs over all of it in
// place. Works alone; with a daemon, a sequence can adopt a shared prefix and publish its own.
//
//   position   0 ........ sink ............................ length - recent ........ length
//   rows       BF16 (own   | INT2 (own, or read in place     | BF16 (own, or a published
//              or shared)  |  from the daemon's memory)      |  prefix's tail)
//
// A row lives in exactly one of the three at any time. The boundary of history moves by whole
// pages: the first query of a chunk sees at least `recent_tokens` BF16 rows before it.
//
// Use, a chunk of tokens at a time (a prefill's piece, or one token):
//   sequence->BeginChunk(n);
//   for each layer: sequence->Append(layer, k, v); sequence->Attend(layer, q, out);
//   sequence->EndChunk();
//
// Thread-compatible: one chunk at a time; Append and Attend may use worker threads inside.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "crumb/cuda/profile.h"
#include "proto/base/ids.h"
#include "proto/page/head_range.h"
#include "proto/page/page_format.h"

namespace crumb {

// A published prefix as a reader sees it: pages [0, num_pages) in memory that is not the reader's.
// What Client::Lookup returns implements this; tests have their own. Thread-safe.
class SharedPrefix {
 public:
  virtual ~SharedPrefix() = default;

  virtual uint32_t num_pages() const = 0;
  // Of the pages. Rows of one profile mean nothing under another.
  virtual const ProfileId& profile_id() const = 0;
  // The head block of a page in one encoding, or null when that encoding is not there. Alive as
  // long as this object; its bytes may be read once WaitForLayer(layer) returned OK. kv_head counts
  // from 0 in the model, not in the rank.
  virtual const std::byte* HeadBlock(PageIdx page,
                                     PageEncoding encoding,
                                     uint32_t layer,
                                     uint32_t kv_head) const = 0;
  // Blocks until the bytes of a layer have arrived, at once where pages are mapped. UNAVAILABLE,
  // DATA_LOSS or DEADLINE_EXCEEDED when they will not.
  virtual absl::Status WaitForLayer(uint32_t layer) = 0;
  // OK only if everything read so far was right: all bytes arrived and match their checksums, the
  // lease is valid and no generation has moved. What was computed from this prefix may be believed
  // only after an OK. FAILED_PRECONDITION: lease over. DATA_LOSS: checksum. Blocks for bytes that
  // are still on their way.
  virtual absl::Status Validate() = 0;
};

class Sequence {
 public:
  struct Options {
    std::shared_ptr<const Profile> profile = nullptr;  // shared: outlives the engine's handle.
    uint32_t num_query_heads = 0;                      // Of the rank; a multiple of its KV heads.
    HeadRange heads = {};
    float scale = 0;                 // Of the scores; 0: 1 / sqrt(key_dim).
    uint32_t max_tokens = 1u << 20;  // RESOURCE_EXHAUSTED beyond.
    uint32_t num_threads = 1;  // For Append, Attend and demotion: KV heads are spread over them.
    // The engine's wish to hold everything in BF16 (a baseline for quality and speed).
    bool keep_all_bf16 = false;
  };

  // INVALID_ARGUMENT names the option, its value and the limit.
  static absl::StatusOr<std::unique_ptr<Sequence>> Create(Options options);
  ~Sequence();
  Sequence(const Sequence&) = delete;
  Sequence& operator=(const Sequence&) = delete;

  // Tokens of finished chunks.
  uint32_t length() const;
  const Profile& profile() const;
  HeadRange heads() const;  // Of the rank; count is never 0 here.

  // Starts from a shared prefix: length() becomes its tokens. FAILED_PRECONDITION unless empty, or
  // if the prefix is of another profile or lacks a page's rows for these heads. Nothing is copied.
  // Pages of the recent window that are there in BF16 are used as such.
  absl::Status Adopt(
      std::shared_ptr<SharedPrefix> prefix);  // shared: with the handle's other users.

  // The BF16 rows of the last recent window before `prefix_tokens` (a multiple of the page size)
  // are kept until ReleaseTail or the end, so that this prefix can be published with its tail
  // however far the sequence has gone by then.
  absl::Status RetainTail(uint32_t prefix_tokens);
  void ReleaseTail();

  // Opens a chunk of `num_tokens` >= 1 tokens at positions [length, length + num_tokens).
  absl::Status BeginChunk(uint32_t num_tokens);
  // The chunk's rows of one layer, as the model made them: keys [num_tokens, num_kv_heads, key_dim]
  // after RoPE, values [num_tokens, num_kv_heads, value_dim], f32, dense. Once a layer.
  // INVALID_ARGUMENT for NaN or inf, naming layer, head and token; the chunk is then to be
  // abandoned.
  absl::Status Append(uint32_t layer, std::span<const float> keys, std::span<const float> values);
  // Attention of the chunk's queries [num_tokens, num_query_heads, key_dim] over everything up to
  // each query's own position; `out` [num_tokens, num_query_heads, value_dim], f32. After Append of
  // the layer. Query head h uses KV head h / (num_query_heads / num_kv_heads) of the rank.
  absl::Status Attend(uint32_t layer, std::span<const float> queries, std::span<float> out);
  // Closes the chunk: checks that an adopted prefix is still what it was, moves length on, and
  // demotes pages that left the recent window. On an error the chunk is undone and nothing that was
  // computed in it may be used.
  absl::Status EndChunk();
  // Drops the open chunk, as if it had not been begun. No-op without one.
  void AbandonChunk();

  // Bytes held: by this sequence itself, and read in place from a shared prefix.
  struct Footprint {
    size_t own_int2_bytes = 0;
    size_t own_bf16_bytes = 0;
    size_t shared_int2_bytes = 0;
    size_t shared_bf16_bytes = 0;
    size_t bf16_equivalent_bytes = 0;  // What the same tokens would take all in BF16.
  };
  Footprint footprint() const;

  // Copies one whole page's image of the rank's heads ([kv_head][layer] head blocks) for
  // publishing. NOT_FOUND when the page is not held in that encoding (any more), or is not
  // complete.
  bool HasPage(PageIdx page, PageEncoding encoding) const;
  // `head_crc32c`, unless it is empty, has an entry for each of the rank's heads and gets the
  // CRC-32C of its bytes in the image.
  absl::Status ExportPage(PageIdx page,
                          PageEncoding encoding,
                          std::span<std::byte> image,
                          std::span<uint32_t> head_crc32c = {}) const;

 private:
  class Impl;
  explicit Sequence(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace crumb
