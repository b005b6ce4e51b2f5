// SPDX-License-Identifier: Apache-2.0
#include "cuda/gpu/pack_head.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cuda/gpu/pack_feedback.h"
#include "proto/base/bfloat16.h"

namespace crumb::gpu {
namespace {

constexpr uint32_t kLanes = 32;
constexpr uint32_t kElementsOfLane[] = {0, 1, 8, 9};  // Of B of m16n8k16, after 2 (lane % 4).

// The two parts of an element of a rotation in bf16.
struct Bf16Parts {
  BFloat16 upper;
  BFloat16 lower;
};
Bf16Parts Split(float x) {
  const BFloat16 upper = BFloat16::FromFloat(x);
  return {upper, BFloat16::FromFloat(x - upper.ToFloat())};
}

class HeadPacker {
 public:
  HeadPacker(const HeadParameters& head, std::span<std::byte> record)
      : head_(head), layout_(RecordOf(head)), dim_(head.key_dim), record_(record) {
    std::fill(record.begin(), record.end(), std::byte{0});
  }

  void Pack() {
    HeadScalars scalars{};
    for (const bool is_value : {false, true}) {
      const float* rotation = is_value ? head_.value_rotation : head_.key_rotation;
      PackTiles(rotation, layout_.rotation(is_value, kRotateUpper),
                layout_.rotation(is_value, kRotateLower));
      PackShift(is_value, rotation);
      scalars.digit_unit[is_value ? 1 : 0] =
          PackDigits(is_value, is_value ? rotation : QueryRotation());
      const bool by_deviation =
          is_value ? head_.values_by_deviation : head_.codec == CodecId::kOscarInt2Lm;
      scalars.clip_from_top[is_value ? 1 : 0] =
          by_deviation ? HeadScalars::kByDeviation
                       : ClipFromTop(is_value ? head_.value_clip : head_.key_clip);
    }
    if (layout_.is_aware) {
      PackFeedback(head_, record_, &scalars);
    }
    if (layout_.is_tilted) {
      PackTiles(QueryRotation(), layout_.query_rotation(kRotateUpper),
                layout_.query_rotation(kRotateLower));
    }
    std::memcpy(record_.data() + layout_.scalars(), &scalars, sizeof(scalars));
  }

 private:
  template <typename T>
  void Store(size_t offset, size_t index, T value) {
    std::memcpy(record_.data() + offset + index * sizeof(T), &value, sizeof(T));
  }

  const float* QueryRotation() const {
    return head_.query_rotation != nullptr ? head_.query_rotation : head_.key_rotation;
  }

  uint32_t ClipFromTop(float ratio) const {
    if (ratio <= 0) {
      return 0;
    }
    const auto index = static_cast<uint32_t>(ratio * static_cast<float>(dim_));
    return dim_ - std::min(index, dim_ - 1);
  }

  // B[k][n] = R[16 step + k][8 tile + n]: the lane of (g, t) has k = 2t + {0, 1, 8, 9} of n = g.
  void PackTiles(const float* matrix, size_t upper, size_t lower) {
    size_t index = 0;
    for (uint32_t tile = 0; tile < dim_ / 8; ++tile) {
      for (uint32_t step = 0; step < dim_ / 16; ++step) {
        for (uint32_t lane = 0; lane < kLanes; ++lane) {
          for (const uint32_t k : kElementsOfLane) {
            const size_t row = size_t{16} * step + size_t{2} * (lane % 4) + k;
            const size_t column = size_t{8} * tile + lane / 4;
            const Bf16Parts parts = Split(matrix[row * dim_ + column]);
            Store(upper, index, parts.upper);
            Store(lower, index, parts.lower);
            ++index;
          }
        }
      }
    }
  }

  void PackShift(bool is_value, const float* rotation) {
    if (is_value) {
      return;
    }
    for (uint32_t column = 0; column < dim_; ++column) {
      double upper = 0;
      double whole = 0;
      for (uint32_t row = 0; row < dim_; ++row) {
        const Bf16Parts parts = Split(rotation[size_t{row} * dim_ + column]);
        const double mean = head_.key_mean[row];
        upper -= mean * double{parts.upper.ToFloat()};
        whole -= mean * (double{parts.upper.ToFloat()} + double{parts.lower.ToFloat()});
      }
      Store(layout_.upper_shift(false), column, static_cast<float>(upper));
      Store(layout_.shift(false), column, static_cast<float>(whole));
      Store(layout_.mean(false), column, head_.key_mean[column]);
    }
  }

  // B[k][n] = R[8 tile + n][32 step + k]: the lane of (g, t) has k = 4t + {0..3}, 16 + 4t + {0..3}
  // of n = g. Returns the unit of the fixed point.
  float PackDigits(bool is_value, const float* rotation) {
    constexpr float kLargest = 127 * 256 + 127;
    float largest = 0;
    for (size_t i = 0; i < size_t{dim_} * dim_; ++i) {
      largest = std::max(largest, std::fabs(rotation[i]));
    }
    const float unit = largest > 0 ? largest / kLargest : 1.0f;
    const auto digits = [&](size_t row, size_t column) {
      return static_cast<int32_t>(std::lround(rotation[row * dim_ + column] / unit));
    };
    size_t index = 0;
    for (uint32_t tile = 0; tile < dim_ / 8; ++tile) {
      for (uint32_t step = 0; step < dim_ / 32; ++step) {
        for (uint32_t lane = 0; lane < kLanes; ++lane) {
          for (uint32_t i = 0; i < 8; ++i) {
            const uint32_t k = 32 * step + i / 4 * 16 + 4 * (lane % 4) + i % 4;
            const int32_t value = std::clamp(digits(8 * tile + lane / 4, k), -32639, 32639);
            const int32_t lower = ((value + 128) & 255) - 128;
            Store(layout_.rotation(is_value, kUnrotateUpper), index,
                  static_cast<int8_t>((value - lower) / 256));
            Store(layout_.rotation(is_value, kUnrotateLower), index, static_cast<int8_t>(lower));
            ++index;
          }
        }
      }
    }
    for (uint32_t row = 0; row < dim_; ++row) {
      int64_t sum = 0;
      for (uint32_t column = 0; column < dim_; ++column) {
        sum += digits(row, column);
      }
      Store(layout_.row_sums(is_value), row, static_cast<float>(sum) * unit);
    }
    return unit;
  }

  const HeadParameters& head_;
  const HeadRecord layout_;
  const uint32_t dim_;
  std::span<std::byte> record_;
};

}  // namespace

HeadRecord RecordOf(const HeadParameters& head) {
  return {head.key_dim, HasFeedback(head.codec), head.codec == CodecId::kOscarInt2Tilted};
}

void PackHead(const HeadParameters& head, std::span<std::byte> record) {
  HeadPacker(head, record).Pack();
}

}  // namespace crumb::gpu
