// SPDX-License-Identifier: Apache-2.0
//
// What tests of sequences share: activations, a naive twin of Sequence, and a prefix in plain
// memory.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "crumb/sequence.h"

namespace crumb {

// Gaussian K, V and queries of every position, the same for the same seed however they are cut into
// chunks.
class Activations {
 public:
  Activations(const Profile& profile, uint32_t num_query_heads, uint32_t num_tokens, uint32_t seed);

  // Rows [first, first + count) of a layer, in the shapes of Append and Attend.
  std::vector<float> Keys(uint32_t layer, uint32_t first, uint32_t count) const;
  std::vector<float> Values(uint32_t layer, uint32_t first, uint32_t count) const;
  std::vector<float> Queries(uint32_t layer, uint32_t first, uint32_t count) const;

  uint32_t num_tokens() const { return num_tokens_; }

 private:
  struct Rows {
    size_t width = 0;
    std::vector<std::vector<float>> layers;
  };
  static std::vector<float> Cut(const Rows& rows, uint32_t layer, uint32_t first, uint32_t count);

  uint32_t num_tokens_;
  Rows keys_;
  Rows values_;
  Rows queries_;
};

// One chunk of the engine's loop. `out` receives [layer] attention outputs when not null. Aborts
// the chunk and returns the error if there is one.
absl::Status RunChunk(Sequence* sequence,
                      const Activations& activations,
                      uint32_t num_tokens,
                      std::vector<std::vector<float>>* out = nullptr);

// The same by brute force and in double: every row kept, every query's mask written out. Rows are
// rotated and demoted by the codec; what this checks is which row is read how.
class NaiveSequence {
 public:
  NaiveSequence(std::shared_ptr<const Profile> profile, uint32_t num_query_heads, bool all_bf16);

  // Attention of a chunk at the current length, [layer][token, query head, value_dim].
  std::vector<std::vector<double>> RunChunk(const Activations& activations, uint32_t num_tokens);

 private:
  struct Head {
    std::vector<double> keys, values;            // All rows as BF16.
    std::vector<double> keys_int2, values_int2;  // Rows of whole pages as a reader of INT2 sees.
  };
  void AppendHead(uint32_t layer,
                  uint32_t kv_head,
                  std::span<const float> keys,
                  std::span<const float> values,
                  uint32_t num_tokens);
  void DemoteWholePages(uint32_t layer, uint32_t kv_head);
  std::vector<double> AttendOne(uint32_t layer,
                                uint32_t kv_head,
                                std::span<const float> query,
                                uint32_t position,
                                uint32_t history_end) const;

  std::shared_ptr<const Profile> profile_;
  uint32_t num_query_heads_;
  bool all_bf16_;
  uint32_t length_ = 0;
  std::vector<std::vector<Head>> heads_;  // [layer][kv_head]
};

// A shared prefix in plain memory.
class FakePrefix : public SharedPrefix {
 public:
  FakePrefix(std::shared_ptr<const Profile> profile, uint32_t num_pages);

  // Every page of `sequence` in each encoding that it holds.
  static std::shared_ptr<FakePrefix> Of(const Sequence& sequence,
                                        std::shared_ptr<const Profile> profile,
                                        uint32_t num_pages);
  void Put(PageIdx page, PageEncoding encoding, std::vector<std::byte> image);
  void Drop(PageIdx page, PageEncoding encoding) { image(page, encoding).clear(); }

  uint32_t num_pages() const override { return num_pages_; }
  const ProfileId& profile_id() const override { return profile_->id(); }
  const std::byte* HeadBlock(PageIdx page,
                             PageEncoding encoding,
                             uint32_t layer,
                             uint32_t kv_head) const override;
  absl::Status WaitForLayer(uint32_t layer) override;
  absl::Status Validate() override;

  absl::Status wait_status;  // What WaitForLayer answers.
  absl::Status valid;        // What Validate answers.
  std::vector<uint32_t> layers_waited_for;

 private:
  std::vector<std::byte>& image(PageIdx page, PageEncoding encoding) {
    return encoding == PageEncoding::kInt2 ? int2_[page.value()] : bf16_[page.value()];
  }

  std::shared_ptr<const Profile> profile_;
  uint32_t num_pages_;
  std::vector<std::vector<std::byte>> int2_;  // Empty: absent.
  std::vector<std::vector<std::byte>> bf16_;
};

}  // namespace crumb
