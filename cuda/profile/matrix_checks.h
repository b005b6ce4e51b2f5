// SPDX-License-Identifier: Apache-2.0
//
// What must be true of a profile's matrices [dim, dim], dim a multiple of 16. INVALID_ARGUMENT
// names the tensor, the elements, the limit. Thread-safe.
#pragma once

#include <cstddef>
#include <string>

#include "absl/status/status.h"

namespace crumb {

// Rows of length one at right angles, to 1e-3 an element.
absl::Status CheckOrthogonal(const std::string& name, const float* rotation, size_t dim);
// A row vector's transform and what undoes it: rotation * inverse^T is the identity, to 1e-3.
absl::Status CheckInverse(const std::string& name,
                          const float* rotation,
                          const float* inverse,
                          size_t dim);
// With a positive diagonal.
absl::Status CheckSymmetric(const std::string& name, const float* metric, size_t dim);
// So too.
absl::Status CheckUpperTriangular(const std::string& name, const float* factor, size_t dim);

}  // namespace crumb
