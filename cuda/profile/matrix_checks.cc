// SPDX-License-Identifier: Apache-2.0
#include "cuda/profile/matrix_checks.h"

#include <array>
#include <cmath>

#include "absl/strings/str_cat.h"

#include "proto/base/status_macros.h"

namespace crumb {
namespace {

constexpr float kOrthogonalityLimit = 1e-3F;  // Of |R R^T - I|, each element.
constexpr size_t kLanes = 16;

template <typename... Parts>
absl::Status Refuse(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat("profile: ", parts...));
}

// By lanes, so that the compiler may use vectors without changing any sum.
float Dot(const float* a, const float* b, size_t count) {
  std::array<float, kLanes> lanes{};
  for (size_t at = 0; at < count; at += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] += a[at + lane] * b[at + lane];
    }
  }
  float sum = 0;
  for (const float lane : lanes) {
    sum += lane;
  }
  return sum;
}

absl::Status CheckDiagonal(const std::string& name, float element, size_t row, size_t dim) {
  if (!(element > 0)) {
    return Refuse("tensor '", name, "': element ", row, " of the diagonal of [", dim, ", ", dim,
                  "] is ", element, "; it must be positive");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckOrthogonal(const std::string& name, const float* rotation, size_t dim) {
  for (size_t row = 0; row < dim; ++row) {
    for (size_t other = 0; other <= row; ++other) {
      const float dot = Dot(rotation + row * dim, rotation + other * dim, dim);
      const float error = std::abs(dot - (row == other ? 1.0F : 0.0F));
      if (!(error <= kOrthogonalityLimit)) {
        return Refuse("tensor '", name, "' is not orthogonal: rows ", other, " and ", row, " of [",
                      dim, ", ", dim, "] have the product ", dot, ", off by ", error, "; at most ",
                      kOrthogonalityLimit, " is allowed");
      }
    }
  }
  return absl::OkStatus();
}

absl::Status CheckInverse(const std::string& name,
                          const float* rotation,
                          const float* inverse,
                          size_t dim) {
  for (size_t row = 0; row < dim; ++row) {
    for (size_t other = 0; other < dim; ++other) {
      const float dot = Dot(rotation + row * dim, inverse + other * dim, dim);
      const float error = std::abs(dot - (row == other ? 1.0F : 0.0F));
      if (!(error <= kOrthogonalityLimit)) {
        return Refuse("tensor '", name, "' is not inverse to the queries': row ", row, " of [", dim,
                      ", ", dim, "] and row ", other, " of query_rotation have the product ", dot,
                      ", off by ", error, "; at most ", kOrthogonalityLimit, " is allowed");
      }
    }
  }
  return absl::OkStatus();
}

absl::Status CheckSymmetric(const std::string& name, const float* metric, size_t dim) {
  for (size_t row = 0; row < dim; ++row) {
    CRUMB_RETURN_IF_ERROR(CheckDiagonal(name, metric[row * dim + row], row, dim));
    for (size_t column = 0; column < row; ++column) {
      if (metric[row * dim + column] != metric[column * dim + row]) {
        return Refuse("tensor '", name, "' is not symmetric: elements (", row, ", ", column,
                      ") and (", column, ", ", row, ") of [", dim, ", ", dim, "] are ",
                      metric[row * dim + column], " and ", metric[column * dim + row]);
      }
    }
  }
  return absl::OkStatus();
}

absl::Status CheckUpperTriangular(const std::string& name, const float* factor, size_t dim) {
  for (size_t row = 0; row < dim; ++row) {
    CRUMB_RETURN_IF_ERROR(CheckDiagonal(name, factor[row * dim + row], row, dim));
    for (size_t column = 0; column < row; ++column) {
      if (factor[row * dim + column] != 0) {
        return Refuse("tensor '", name, "': row ", row, ", column ", column, " of [", dim, ", ",
                      dim, "] is ", factor[row * dim + column],
                      "; below the diagonal all must be 0");
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace crumb
