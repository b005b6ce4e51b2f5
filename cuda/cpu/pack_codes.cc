// SPDX-License-Identifier: Apache-2.0
#include "cuda/cpu/pack_codes.h"

#include <cstring>

#include "proto/page/page_format.h"

namespace crumb::cpu {
namespace {

uint64_t LoadEight(const uint8_t* from) {
  uint64_t eight;
  std::memcpy(&eight, from, sizeof(eight));
  return eight;
}

void StoreWord(uint32_t word, std::byte* packed, size_t index) {
  std::memcpy(packed + 4 * index, &word, sizeof(word));
}

uint32_t LoadWord(const std::byte* packed, size_t index) {
  uint32_t word;
  std::memcpy(&word, packed + 4 * index, sizeof(word));
  return word;
}

// Four codes, those of the lowest two bits of each byte.
void StoreFour(uint32_t word, uint8_t* codes) {
  word &= 0x03030303;
  std::memcpy(codes, &word, sizeof(word));
}

// Byte i of each operand becomes bytes 2 i and 2 i + 1, for i in 0..3.
uint64_t InterleaveLow(uint64_t a, uint64_t b) {
  const auto spread = [](uint64_t x) {
    x &= 0xffffffff;
    x = (x | x << 16) & 0x0000ffff0000ffff;
    return (x | x << 8) & 0x00ff00ff00ff00ff;
  };
  return spread(a) | spread(b) << 8;
}

// Bytes i of a, b, c and d, in this order, for i and i + 1: one of four pairs of words.
struct FourWords {
  uint32_t words[4];
};
FourWords Transpose(uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
  const uint64_t ab = InterleaveLow(a, b);
  const uint64_t cd = InterleaveLow(c, d);
  FourWords result{};
  for (size_t i = 0; i < 4; ++i) {
    result.words[i] =
        static_cast<uint32_t>(((ab >> (16 * i)) & 0xffff) | ((cd >> (16 * i)) & 0xffff) << 16);
  }
  return result;
}

}  // namespace

// NOLINTNEXTLINE(readability-function-size): one loop an index of the format.
void PackKeyCodes(const uint8_t* codes, size_t dim, std::byte* packed) {
  const size_t num_steps = dim / 32;
  for (size_t tile = 0; tile < kPageTokens / 16; ++tile) {
    for (size_t step = 0; step < num_steps; ++step) {
      for (size_t t = 0; t < 4; ++t) {
        uint64_t bytes[4];  // Byte j of the words of g = 0..7.
        for (size_t j = 0; j < 4; ++j) {
          const uint8_t* from = codes + (32 * step + 4 * t + j) * kPageTokens + 16 * tile;
          const uint8_t* upper = from + size_t{16} * kPageTokens;
          bytes[j] = LoadEight(from) | LoadEight(from + 8) << 2 | LoadEight(upper) << 4 |
                     LoadEight(upper + 8) << 6;
        }
        const auto word_of_lane = static_cast<uint32_t>(tile * num_steps + step);
        for (size_t half = 0; half < 2; ++half) {
          const size_t shift = 32 * half;
          const FourWords four =
              Transpose(bytes[0] >> shift, bytes[1] >> shift, bytes[2] >> shift, bytes[3] >> shift);
          for (size_t i = 0; i < 4; ++i) {
            const auto lane = static_cast<uint32_t>(4 * (4 * half + i) + t);
            StoreWord(four.words[i], packed, Int2HeadBlock::WordIndex(word_of_lane, lane));
          }
        }
      }
    }
  }
}

// NOLINTNEXTLINE(readability-function-size): one loop an index of the format.
void PackValueCodes(const uint8_t* codes, size_t dim, std::byte* packed) {
  for (size_t tile = 0; tile < dim / 16; ++tile) {
    for (size_t g = 0; g < 8; ++g) {
      const uint8_t* lower = codes + (16 * tile + g) * size_t{kPageTokens};
      const uint8_t* upper = lower + size_t{8} * kPageTokens;
      for (size_t kk = 0; kk < 2; ++kk) {
        uint64_t bytes[4];  // Byte j of the words of t = 0..3.
        for (size_t j = 0; j < 4; ++j) {
          const size_t token = 16 * j + 8 * kk;
          const uint64_t rows = LoadEight(lower + token) | LoadEight(upper + token) << 2;
          bytes[j] = rows | (rows >> 32) << 4;  // The second four tokens over the first.
        }
        const FourWords four = Transpose(bytes[0], bytes[1], bytes[2], bytes[3]);
        for (size_t t = 0; t < 4; ++t) {
          const auto word_of_lane = static_cast<uint32_t>(2 * tile + kk);
          const auto lane = static_cast<uint32_t>(4 * g + t);
          StoreWord(four.words[t], packed, Int2HeadBlock::WordIndex(word_of_lane, lane));
        }
      }
    }
  }
}

void UnpackKeyCodes(const std::byte* packed, size_t dim, uint8_t* codes) {
  const size_t num_steps = dim / 32;
  for (size_t tile = 0; tile < kPageTokens / 16; ++tile) {
    for (size_t step = 0; step < num_steps; ++step) {
      for (size_t lane = 0; lane < 32; ++lane) {
        const auto word_of_lane = static_cast<uint32_t>(tile * num_steps + step);
        const uint32_t word =
            LoadWord(packed, Int2HeadBlock::WordIndex(word_of_lane, static_cast<uint32_t>(lane)));
        uint8_t* to = codes + (16 * tile + lane / 4) * dim + 32 * step + 4 * (lane % 4);
        StoreFour(word, to);
        StoreFour(word >> 2, to + 8 * dim);
        StoreFour(word >> 4, to + 16);
        StoreFour(word >> 6, to + 8 * dim + 16);
      }
    }
  }
}

void UnpackValueCodes(const std::byte* packed, size_t dim, uint8_t* codes) {
  for (size_t word_of_lane = 0; word_of_lane < dim / 16 * 2; ++word_of_lane) {
    const size_t tile = word_of_lane / 2;
    const size_t kk = word_of_lane % 2;
    for (size_t i = 0; i < 8; ++i) {  // Four channels, g = 4 * (i / 4) + 0..3, of t = i % 4.
      const size_t first_lane = i / 4 * 16 + i % 4;
      uint32_t words[4];
      for (size_t g = 0; g < 4; ++g) {
        words[g] =
            LoadWord(packed, Int2HeadBlock::WordIndex(static_cast<uint32_t>(word_of_lane),
                                                      static_cast<uint32_t>(first_lane + 4 * g)));
      }
      const FourWords rows = Transpose(words[0], words[1], words[2], words[3]);
      for (size_t j = 0; j < 4; ++j) {
        const size_t token = 16 * j + 8 * kk + i % 4;
        uint8_t* to = codes + token * dim + 16 * tile + i / 4 * 4;
        StoreFour(rows.words[j], to);
        StoreFour(rows.words[j] >> 2, to + 8);
        StoreFour(rows.words[j] >> 4, to + 4 * dim);
        StoreFour(rows.words[j] >> 6, to + 4 * dim + 8);
      }
    }
  }
}

void PackMeta(const uint16_t* scales, const uint16_t* minima, std::byte* meta) {
  for (uint32_t token = 0; token < kPageTokens; ++token) {
    const uint16_t pair[2] = {scales[token], minima[token]};
    std::memcpy(meta + 4 * Int2HeadBlock::MetaIndex(token), pair, sizeof(pair));
  }
}

}  // namespace crumb::cpu
