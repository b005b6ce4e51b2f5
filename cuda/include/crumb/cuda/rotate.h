// SPDX-License-Identifier: Apache-2.0
//
// Into and out of the rotated space in which pages are stored. Row vectors: rotated = row * R.
// A query that is rotated like the keys gives the same scores (by the transposed inverse where keys
// are scaled as well), and one inverse rotation of the output serves the two-bit and the BF16
// segments alike.
//
// All: blocking, Thread-safe, no allocation visible to the caller; rows are dense, row-major;
// `rows.size()` is a multiple of the dimension and `out` has the same length. in and out must not
// overlap.
#pragma once

#include <span>

#include "crumb/cuda/cpu_path.h"
#include "crumb/cuda/profile.h"
#include "proto/base/bfloat16.h"

namespace crumb {

// (row - key_mean) * key_rotation, rounded to bfloat16. [n, key_dim].
void RotateKeys(const HeadParameters& head,
                std::span<const float> rows,
                std::span<BFloat16> out,
                CpuPath path = BestCpuPath());
// row * value_rotation, rounded to bfloat16. [n, value_dim].
void RotateValues(const HeadParameters& head,
                  std::span<const float> rows,
                  std::span<BFloat16> out,
                  CpuPath path = BestCpuPath());
// row * query_rotation (key_rotation without one), in float: keys alone are mean-shifted, since
// softmax does not see a constant shift of a query's scores. [n, key_dim].
void RotateQueries(const HeadParameters& head,
                   std::span<const float> rows,
                   std::span<float> out,
                   CpuPath path = BestCpuPath());
// row * value_rotation^T. [n, value_dim].
void UnrotateOutputs(const HeadParameters& head,
                     std::span<const float> rows,
                     std::span<float> out,
                     CpuPath path = BestCpuPath());

}  // namespace crumb
