// SPDX-License-Identifier: Apache-2.0
//
// Byte-level BPE (the "gpt2" tokenizers of GGUF) from a model file's own vocabulary and merges, and
// the ChatML form of a conversation. Immutable; Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "absl/status/statusor.h"

#include "client/example/gguf_file.h"
#include "client/example/pretokenize.h"

namespace crumb::example {

struct ChatMessage {
  std::string role;  // "system", "user", "assistant"
  std::string content;
};

class Tokenizer {
 public:
  // INVALID_ARGUMENT names what the file lacks or what this tokenizer does not know: another kind
  // of tokenizer, another pre-tokenizer, a merge of tokens that are not in the vocabulary.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> Create(const GgufFile& file);

  // Text as text: the name of a control token in it ("<|im_end|>") is spelled out and never becomes
  // that token, so what a user writes cannot end his turn. Bytes that the vocabulary has no token
  // for are left out, as the reference implementation does (SmolLM's lacks some control characters
  // and bytes that UTF-8 never has).
  std::vector<uint32_t> Encode(std::string_view text) const;

  // One message as ChatML: <|im_start|>role\ncontent<|im_end|>\n. INVALID_ARGUMENT when the
  // vocabulary lacks these two tokens.
  absl::StatusOr<std::vector<uint32_t>> EncodeMessage(const ChatMessage& message) const;
  // <|im_start|>assistant\n: what the model continues with its answer.
  absl::StatusOr<std::vector<uint32_t>> EncodeAnswerStart() const;

  // The bytes of tokens, control tokens left out. Ids beyond the vocabulary are left out too.
  std::string Decode(std::span<const uint32_t> tokens) const;

  std::optional<uint32_t> FindControlToken(std::string_view name) const;
  uint32_t vocabulary_size() const { return static_cast<uint32_t>(token_bytes_.size()); }
  // Ends an answer.
  uint32_t end_token() const { return end_token_; }

 private:
  struct Merge {
    uint32_t rank = 0;  // The lowest goes first.
    uint32_t token = 0;
  };

  Tokenizer() = default;
  absl::Status ReadVocabulary(const GgufFile& file);
  absl::Status ReadMerges(const GgufFile& file);
  void EncodePiece(std::string_view piece, std::vector<uint32_t>& tokens) const;
  static uint64_t PairKey(uint32_t left, uint32_t right) { return uint64_t{left} << 32 | right; }

  Pretokenizer pretokenizer_ = Pretokenizer::kGpt2;
  std::vector<std::string> token_bytes_;  // Empty for control tokens.
  std::unordered_map<std::string, uint32_t> token_of_bytes_;
  std::unordered_map<std::string, uint32_t> control_tokens_;
  std::unordered_map<uint64_t, Merge> merges_;  // By PairKey of the two tokens.
  std::vector<uint32_t> byte_tokens_;           // [256]; ~0: none.
  uint32_t end_token_ = 0;
};

}  // namespace crumb::example
