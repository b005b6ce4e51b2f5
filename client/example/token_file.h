// SPDX-License-Identifier: Apache-2.0
//
// Texts of equal length as token ids: a raw array of little-endian u32, one text after another, as
// bench/accuracy/npz_to_tokens.py writes it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

#include "absl/status/statusor.h"

namespace crumb::example {

class TokenFile {
 public:
  // NOT_FOUND: no such file. INVALID_ARGUMENT: not a whole number of texts of `text_tokens` ids, or
  // an id that is not below `vocabulary_size`.
  static absl::StatusOr<TokenFile> Read(const std::filesystem::path& path,
                                        uint32_t text_tokens,
                                        uint32_t vocabulary_size);

  uint32_t num_texts() const { return static_cast<uint32_t>(ids_.size() / text_tokens_); }
  // index < num_texts().
  std::span<const uint32_t> text(uint32_t index) const {
    return std::span(ids_).subspan(size_t{index} * text_tokens_, text_tokens_);
  }

 private:
  TokenFile(std::vector<uint32_t> ids, uint32_t text_tokens)
      : ids_(std::move(ids)), text_tokens_(text_tokens) {}

  std::vector<uint32_t> ids_;
  uint32_t text_tokens_;
};

}  // namespace crumb::example
