// SPDX-License-Identifier: Apache-2.0
#include "client/example/tokenizer.h"

#include <functional>
#include <queue>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

#include "proto/base/status_macros.h"

namespace crumb::example {
namespace {

// llama.cpp's token types that are never made from text.
constexpr int64_t kUnknownTokenType = 2;
constexpr int64_t kControlTokenType = 3;
constexpr uint32_t kNone = 0xffffffff;

// GPT-2 writes each byte of a token as a printable character: itself where it is one in Latin-1,
// otherwise the next unused of U+0100 and following.
std::unordered_map<uint32_t, char> BytesOfCharacters() {
  std::unordered_map<uint32_t, char> bytes;
  uint32_t next = 0x100;
  for (uint32_t byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte != 0xad);
    bytes.emplace(printable ? byte : next++, static_cast<char>(byte));
  }
  return bytes;
}

// The bytes that a token's text stands for; nothing if it has other characters.
std::optional<std::string> BytesOfText(const std::unordered_map<uint32_t, char>& bytes,
                                       std::string_view text) {
  std::string result;
  for (size_t i = 0; i < text.size(); ++i) {
    // All of these characters are below U+0800: one or two bytes of UTF-8.
    uint32_t point = static_cast<uint8_t>(text[i]);
    if (point >= 0xc2 && point < 0xe0 && i + 1 < text.size()) {
      point = (point & 0x1f) << 6 | (static_cast<uint8_t>(text[++i]) & 0x3fu);
    }
    const auto found = bytes.find(point);
    if (found == bytes.end()) {
      return std::nullopt;
    }
    result.push_back(found->second);
  }
  return result;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::Create(const GgufFile& file) {
  CRUMB_ASSIGN_OR_RETURN(const std::string model, file.GetString("tokenizer.ggml.model"));
  CRUMB_ASSIGN_OR_RETURN(const std::string pretokenizer, file.GetString("tokenizer.ggml.pre"));
  if (model != "gpt2") {
    return absl::InvalidArgumentError(
        absl::StrCat(file.path().string(), ": tokenizer model ", model,
                     " is not known here, only gpt2 (byte-level BPE)"));
  }
  std::unique_ptr<Tokenizer> tokenizer(new Tokenizer);
  if (pretokenizer == "smollm") {
    tokenizer->pretokenizer_ = Pretokenizer::kSmolLm;
  } else if (pretokenizer == "gpt-2") {
    tokenizer->pretokenizer_ = Pretokenizer::kGpt2;
  } else {
    return absl::InvalidArgumentError(absl::StrCat(file.path().string(), ": pre-tokenizer ",
                                                   pretokenizer,
                                                   " is not known here, only smollm and gpt-2"));
  }
  CRUMB_RETURN_IF_ERROR(tokenizer->ReadVocabulary(file));
  CRUMB_RETURN_IF_ERROR(tokenizer->ReadMerges(file));
  CRUMB_ASSIGN_OR_RETURN(tokenizer->end_token_, file.GetUint("tokenizer.ggml.eos_token_id", 0,
                                                             tokenizer->vocabulary_size() - 1));
  return tokenizer;
}

absl::Status Tokenizer::ReadVocabulary(const GgufFile& file) {
  CRUMB_ASSIGN_OR_RETURN(const auto texts, file.GetStrings("tokenizer.ggml.tokens"));
  CRUMB_ASSIGN_OR_RETURN(const auto types, file.GetIntegers("tokenizer.ggml.token_type"));
  if (texts.empty() || texts.size() >= kNone || types.size() != texts.size()) {
    return absl::InvalidArgumentError(absl::StrCat(file.path().string(), ": ", texts.size(),
                                                   " tokens and ", types.size(),
                                                   " token types, which must be as many"));
  }
  const auto bytes = BytesOfCharacters();
  token_bytes_.resize(texts.size());
  for (uint32_t id = 0; id < texts.size(); ++id) {
    std::optional<std::string> token = BytesOfText(bytes, texts[id]);
    if (types[id] == kUnknownTokenType || types[id] == kControlTokenType || !token.has_value()) {
      control_tokens_.emplace(texts[id], id);
      continue;
    }
    token_of_bytes_.emplace(*token, id);
    token_bytes_[id] = *std::move(token);
  }
  for (int byte = 0; byte < 256; ++byte) {
    const auto found = token_of_bytes_.find(std::string(1, static_cast<char>(byte)));
    byte_tokens_.push_back(found == token_of_bytes_.end() ? kNone : found->second);
  }
  return absl::OkStatus();
}

absl::Status Tokenizer::ReadMerges(const GgufFile& file) {
  CRUMB_ASSIGN_OR_RETURN(const auto texts, file.GetStrings("tokenizer.ggml.merges"));
  const auto bytes = BytesOfCharacters();
  const auto find = [&](const std::string& token) {
    const auto found = token_of_bytes_.find(token);
    return found == token_of_bytes_.end() ? kNone : found->second;
  };
  for (uint32_t rank = 0; rank < texts.size(); ++rank) {
    const std::string& text = texts[rank];
    const size_t space = text.find(' ');
    const auto left = BytesOfText(bytes, std::string_view(text).substr(0, space));
    const auto right = BytesOfText(
        bytes, space == std::string::npos ? "" : std::string_view(text).substr(space + 1));
    const uint32_t left_token = left.has_value() ? find(*left) : kNone;
    const uint32_t right_token = right.has_value() ? find(*right) : kNone;
    const uint32_t token =
        left_token != kNone && right_token != kNone ? find(*left + *right) : kNone;
    if (token == kNone) {
      return absl::InvalidArgumentError(absl::StrCat(file.path().string(), ": merge ", rank, " (",
                                                     text, ") is not of tokens of the vocabulary"));
    }
    merges_.emplace(PairKey(left_token, right_token), Merge{rank, token});
  }
  return absl::OkStatus();
}

std::vector<uint32_t> Tokenizer::Encode(std::string_view text) const {
  std::vector<uint32_t> tokens;
  Pretokenize(pretokenizer_, text, [&](std::string_view piece) { EncodePiece(piece, tokens); });
  return tokens;
}

// Merges neighbours by lowest rank, leftmost first. A heap keeps a piece of n bytes at n log n:
// text without spaces can be long.
void Tokenizer::EncodePiece(std::string_view piece, std::vector<uint32_t>& tokens) const {
  struct Node {
    uint32_t token = kNone;  // kNone: merged into its left neighbour.
    uint32_t previous = kNone;
    uint32_t next = kNone;
  };
  struct Candidate {
    uint32_t rank = 0;
    uint32_t left = 0;  // Nodes.
    uint32_t right = 0;
    uint64_t pair = 0;  // As it was when the candidate was made; stale if it is another now.
    bool operator>(const Candidate& other) const {
      return std::pair(rank, left) > std::pair(other.rank, other.left);
    }
  };
  std::vector<Node> nodes;
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> candidates;
  const auto pair_of = [&](uint32_t left, uint32_t right) {
    return PairKey(nodes[left].token, nodes[right].token);
  };
  const auto consider = [&](uint32_t left, uint32_t right) {
    if (left == kNone || right == kNone) {
      return;
    }
    if (const auto merge = merges_.find(pair_of(left, right)); merge != merges_.end()) {
      candidates.push({merge->second.rank, left, right, merge->first});
    }
  };

  for (const char byte : piece) {
    if (const uint32_t token = byte_tokens_[static_cast<uint8_t>(byte)]; token != kNone) {
      const auto index = static_cast<uint32_t>(nodes.size());
      nodes.push_back({token, index == 0 ? kNone : index - 1, index + 1});
    }
  }
  if (nodes.empty()) {
    return;
  }
  nodes.back().next = kNone;
  for (uint32_t i = 0; i + 1 < nodes.size(); ++i) {
    consider(i, i + 1);
  }
  while (!candidates.empty()) {
    const Candidate best = candidates.top();
    candidates.pop();
    Node& left = nodes[best.left];
    Node& right = nodes[best.right];
    if (left.next != best.right || pair_of(best.left, best.right) != best.pair) {
      continue;
    }
    left.token = merges_.find(best.pair)->second.token;
    left.next = right.next;
    right.token = kNone;
    if (left.next != kNone) {
      nodes[left.next].previous = best.left;
    }
    consider(left.previous, best.left);
    consider(best.left, left.next);
  }
  for (const Node& node : nodes) {
    if (node.token != kNone) {
      tokens.push_back(node.token);
    }
  }
}

absl::StatusOr<std::vector<uint32_t>> Tokenizer::EncodeMessage(const ChatMessage& message) const {
  const std::optional<uint32_t> start = FindControlToken("<|im_start|>");
  const std::optional<uint32_t> end = FindControlToken("<|im_end|>");
  if (!start.has_value() || !end.has_value()) {
    return absl::InvalidArgumentError(
        "the model's vocabulary has no <|im_start|> and <|im_end|>: it knows no ChatML");
  }
  std::vector<uint32_t> tokens = {*start};
  const std::vector<uint32_t> text = Encode(absl::StrCat(message.role, "\n", message.content));
  tokens.insert(tokens.end(), text.begin(), text.end());
  tokens.push_back(*end);
  const std::vector<uint32_t> newline = Encode("\n");
  tokens.insert(tokens.end(), newline.begin(), newline.end());
  return tokens;
}

absl::StatusOr<std::vector<uint32_t>> Tokenizer::EncodeAnswerStart() const {
  const std::optional<uint32_t> start = FindControlToken("<|im_start|>");
  if (!start.has_value()) {
    return absl::InvalidArgumentError("the model's vocabulary has no <|im_start|>");
  }
  std::vector<uint32_t> tokens = {*start};
  const std::vector<uint32_t> text = Encode("assistant\n");
  tokens.insert(tokens.end(), text.begin(), text.end());
  return tokens;
}

std::string Tokenizer::Decode(std::span<const uint32_t> tokens) const {
  std::string text;
  for (const uint32_t token : tokens) {
    if (token < token_bytes_.size()) {
      text += token_bytes_[token];
    }
  }
  return text;
}

std::optional<uint32_t> Tokenizer::FindControlToken(std::string_view name) const {
  const auto found = control_tokens_.find(std::string(name));
  return found == control_tokens_.end() ? std::nullopt : std::optional(found->second);
}

}  // namespace crumb::example
