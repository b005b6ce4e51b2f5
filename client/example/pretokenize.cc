// SPDX-License-Identifier: Apache-2.0
#include "client/example/pretokenize.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <vector>

namespace crumb::example {
namespace {

enum class CharClass : uint8_t { kLetter, kNumber, kSpace, kOther, kEnd };

struct ClassRange {
  uint32_t first;
  uint32_t last;
  CharClass kind;
};

constexpr ClassRange kClassRanges[] = {
#define L CharClass::kLetter
#define N CharClass::kNumber
#include "client/example/unicode_table.inc"
#undef L
#undef N
};

// The White_Space property.
bool IsSpace(uint32_t point) {
  return (point >= 0x9 && point <= 0xd) || point == 0x20 || point == 0x85 || point == 0xa0 ||
         point == 0x1680 || (point >= 0x2000 && point <= 0x200a) || point == 0x2028 ||
         point == 0x2029 || point == 0x202f || point == 0x205f || point == 0x3000;
}

CharClass ClassOf(uint32_t point) {
  if (IsSpace(point)) {
    return CharClass::kSpace;
  }
  const auto* range =
      std::lower_bound(std::begin(kClassRanges), std::end(kClassRanges), point,
                       [](const ClassRange& entry, uint32_t value) { return entry.last < value; });
  return range != std::end(kClassRanges) && range->first <= point ? range->kind : CharClass::kOther;
}

struct Char {
  size_t offset = 0;  // Of its first byte.
  CharClass kind = CharClass::kEnd;
  char ascii = 0;  // 0 for what is not ASCII.
};

// The character at text[offset] and its length; a byte that starts none is one character, U+FFFD.
uint32_t DecodeUtf8(std::string_view text, size_t offset, size_t& length) {
  constexpr uint32_t kReplacement = 0xfffd;
  const auto lead = static_cast<uint8_t>(text[offset]);
  length = 1;
  if (lead < 0x80) {
    return lead;
  }
  const size_t need = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || offset + need > text.size()) {
    return kReplacement;
  }
  uint32_t point = lead & (0x7fu >> need);
  for (size_t i = 1; i < need; ++i) {
    const auto next = static_cast<uint8_t>(text[offset + i]);
    if ((next & 0xc0) != 0x80) {
      return kReplacement;
    }
    point = point << 6 | (next & 0x3fu);
  }
  length = need;
  return point;
}

// The characters of `text`, and one of class kEnd after the last.
std::vector<Char> Classify(std::string_view text) {
  std::vector<Char> chars;
  chars.reserve(text.size() + 1);
  size_t length = 0;
  for (size_t offset = 0; offset < text.size(); offset += length) {
    const uint32_t point = DecodeUtf8(text, offset, length);
    chars.push_back({offset, ClassOf(point), point < 0x80 ? static_cast<char>(point) : '\0'});
  }
  chars.push_back({text.size(), CharClass::kEnd, '\0'});
  return chars;
}

class Splitter {
 public:
  Splitter(Pretokenizer pretokenizer, std::string_view text)
      : single_numbers_(pretokenizer == Pretokenizer::kSmolLm),
        text_(text),
        chars_(Classify(text)) {}

  // Index of the character after the piece that starts at character `i`.
  size_t PieceEnd(size_t i) const {
    if (single_numbers_ && chars_[i].kind == CharClass::kNumber) {
      return i + 1;
    }
    if (const size_t length = ContractionLength(i); length > 0) {
      return i + length;
    }
    // A space belongs to the word, number or run of signs after it.
    const size_t start = i + (chars_[i].ascii == ' ' ? 1 : 0);
    const CharClass kind = chars_[start].kind;
    if (kind == CharClass::kLetter || kind == CharClass::kOther ||
        (kind == CharClass::kNumber && !single_numbers_)) {
      return RunEnd(start);
    }
    // Spaces: all of them at the end of the text, otherwise all but the last, which belongs to what
    // follows; a lone one that cannot is a piece of its own.
    const size_t end = RunEnd(i);
    return EndsText(end) || end == i + 1 ? end : end - 1;
  }

  void ForEachPiece(const std::function<void(std::string_view)>& piece) const {
    for (size_t i = 0; i + 1 < chars_.size();) {
      const size_t end = PieceEnd(i);
      piece(text_.substr(chars_[i].offset, chars_[end].offset - chars_[i].offset));
      i = end;
    }
  }

 private:
  size_t RunEnd(size_t i) const {
    const CharClass kind = chars_[i].kind;
    while (chars_[i].kind == kind) {
      ++i;
    }
    return i;
  }

  // Whether the text, as the expression sees it, ends before character `i`.
  bool EndsText(size_t i) const {
    return chars_[i].kind == CharClass::kEnd ||
           (single_numbers_ && chars_[i].kind == CharClass::kNumber);
  }

  size_t ContractionLength(size_t i) const {
    static constexpr std::array<std::string_view, 7> kContractions = {"'s", "'t",  "'re", "'ve",
                                                                      "'m", "'ll", "'d"};
    if (chars_[i].ascii != '\'') {
      return 0;
    }
    const std::string_view rest = text_.substr(chars_[i].offset);
    for (const std::string_view contraction : kContractions) {
      if (rest.starts_with(contraction)) {
        return contraction.size();  // ASCII: as many characters as bytes.
      }
    }
    return 0;
  }

  const bool single_numbers_;
  const std::string_view text_;
  const std::vector<Char> chars_;
};

}  // namespace

void Pretokenize(Pretokenizer pretokenizer,
                 std::string_view text,
                 const std::function<void(std::string_view)>& piece) {
  Splitter(pretokenizer, text).ForEachPiece(piece);
}

}  // namespace crumb::example
