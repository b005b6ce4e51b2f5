// SPDX-License-Identifier: Apache-2.0
#include "cuda/gpu/pack_feedback.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cuda/gpu/pack_head.h"
#include "proto/base/float16.h"

namespace crumb::gpu {
namespace {

constexpr uint32_t kLanes = 32;

// What makes the root mean square of the elements one.
double UnitOf(std::span<const double> elements) {
  double sum = 0;
  for (const double x : elements) {
    sum += x * x;
  }
  return sum > 0 ? std::sqrt(static_cast<double>(elements.size()) / sum) : 1.0;
}

class FeedbackPacker {
 public:
  FeedbackPacker(const HeadParameters& head, std::span<std::byte> record)
      : head_(head), layout_(RecordOf(head)), dim_(head.key_dim), record_(record) {
    for (size_t i = 0; i < dim_; ++i) {
      inverses_.push_back(1 / At(i, i));
    }
    unit_ = UnitOf(inverses_);
  }

  void Pack(HeadScalars* scalars) {
    scalars->loss_unit = static_cast<float>(1 / (unit_ * unit_));
    for (size_t block = 0; block < layout_.num_blocks(); ++block) {
      PackDiagonal(block);
      for (size_t above = 0; above < block; ++above) {
        PackTile(above, block);
      }
    }
    if (layout_.is_tilted) {
      PackReaders(scalars);
    }
  }

 private:
  static constexpr size_t kBlock = HeadRecord::kBlock;
  static constexpr size_t kQuarter = kBlock / 2;  // A side of it.

  double At(size_t row, size_t column) const {
    return double{head_.key_feedback[row * dim_ + column]};
  }
  template <typename T>
  void Store(size_t offset, size_t index, T value) {
    std::memcpy(record_.data() + offset + index * sizeof(T), &value, sizeof(T));
  }
  void StoreHalf(size_t offset, size_t index, double value) {
    Store(offset, index, Float16::FromFloatSaturated(static_cast<float>(value)));
  }

  void PackDiagonal(size_t block) {
    for (size_t i = 0; i < kBlock; ++i) {
      const size_t row = block * kBlock + i;
      for (size_t j = i; j < kBlock; ++j) {
        const double weight = i == j ? unit_ : -At(row, block * kBlock + j);
        StoreHalf(layout_.diagonal(), row * kBlock + j, weight * inverses_[row]);
      }
    }
  }

  // A[m][k] = -C[16 row + k][16 column + m] / C[16 row + k][16 row + k], its quarters one after
  // another: m below 8, then from 8 on, and the same of k from 8 on.
  void PackTile(size_t row, size_t column) {
    size_t index = 0;
    for (size_t quarter = 0; quarter < 4; ++quarter) {
      for (size_t i = 0; i < kQuarter * kQuarter; ++i) {
        const size_t m = quarter % 2 * kQuarter + i / kQuarter;
        const size_t k = row * kBlock + quarter / 2 * kQuarter + i % kQuarter;
        StoreHalf(layout_.feedback() + HeadRecord::feedback_tile(static_cast<uint32_t>(row),
                                                                 static_cast<uint32_t>(column)),
                  index++, -At(k, column * kBlock + m) * inverses_[k]);
      }
    }
  }

  // The inverse of the feedback factor, row after row from the last on.
  std::vector<double> Whitening() const {
    const size_t dim = dim_;
    std::vector<double> inverse(dim * dim);
    for (size_t i = dim; i-- > 0;) {
      double* row = inverse.data() + i * dim;
      for (size_t k = i + 1; k < dim; ++k) {
        const double weight = -At(i, k);
        const double* below = inverse.data() + k * dim;
        for (size_t j = k; j < dim; ++j) {
          row[j] += weight * below[j];
        }
      }
      row[i] = 1;
      for (size_t j = i; j < dim; ++j) {
        row[j] *= inverses_[i];
      }
    }
    return inverse;
  }

  // With C the factor and M = (C^T C)^-1 the metric, a M b^T is the product of a C^-1 and b C^-1,
  // and e m^T, the score of an error e under the mean query m, that of e C^-1 and (C m^T)^T.
  void PackReaders(HeadScalars* scalars) {
    const std::vector<double> inverse = Whitening();
    std::vector<double> ones(dim_);
    std::vector<double> mean(dim_);
    double mean_sum = 0;
    double ones2 = 0;
    for (size_t i = 0; i < dim_; ++i) {
      for (size_t j = i; j < dim_; ++j) {
        ones[j] += inverse[i * dim_ + j];
        mean[i] += At(i, j) * double{head_.query_mean[j]};
      }
      mean_sum += double{head_.query_mean[i]};
    }
    for (size_t i = 0; i < dim_; ++i) {
      ones2 += ones[i] * ones[i];
    }
    scalars->ones_in_metric = static_cast<float>(ones2);
    scalars->query_mean_sum = static_cast<float>(mean_sum);
    PackWhitening(inverse);
    scalars->ones_unit = PackReader(0, ones);
    scalars->mean_unit = PackReader(1, mean);
  }

  // Blocks on the diagonal of C's inverse are the inverses of those on C's. In four registers a
  // lane of (g, t): columns g of rows 2t, 2t + 1, then of 2t + 8, 2t + 9; and the same of columns g
  // + 8.
  void PackWhitening(const std::vector<double>& inverse) {
    size_t index = 0;
    for (size_t block = 0; block < layout_.num_blocks(); ++block) {
      for (size_t lane = 0; lane < kLanes; ++lane) {
        for (size_t i = 0; i < 8; ++i) {
          const size_t row = block * kBlock + lane % 4 * 2 + i / 2 % 2 * kQuarter + i % 2;
          const size_t column = block * kBlock + lane / 4 + i / 4 * kQuarter;
          StoreHalf(layout_.whitening(), index++, inverse[row * dim_ + column] / inverses_[column]);
        }
      }
    }
  }

  // Row `which` of the operand A; returns the unit of its elements.
  float PackReader(size_t which, std::vector<double> elements) {
    for (size_t i = 0; i < dim_; ++i) {
      elements[i] *= inverses_[i];
    }
    const double unit = UnitOf(elements);
    for (size_t step = 0; step < dim_ / 16; ++step) {
      for (size_t t = 0; t < 4; ++t) {
        const size_t lane = 4 * which + t;
        for (size_t i = 0; i < 4; ++i) {
          const size_t channel = 16 * step + 2 * t + i / 2 * 8 + i % 2;
          StoreHalf(layout_.readers(), (step * kLanes + lane) * 4 + i, elements[channel] * unit);
        }
      }
    }
    return static_cast<float>(1 / unit);
  }

  const HeadParameters& head_;
  const HeadRecord layout_;
  const size_t dim_;
  std::span<std::byte> record_;
  std::vector<double> inverses_;  // Of the factor's diagonal.
  double unit_ = 1;
};

}  // namespace

void PackFeedback(const HeadParameters& head, std::span<std::byte> record, HeadScalars* scalars) {
  FeedbackPacker(head, record).Pack(scalars);
}

}  // namespace crumb::gpu
