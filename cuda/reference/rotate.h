// SPDX-License-Identifier: Apache-2.0
//
// The readable twin of rotation: one dot product an element, accumulated in double.
#pragma once

#include <cstddef>
#include <span>

namespace crumb::reference {

// One row: out = (row - mean) * rotation. All of length dim, rotation [dim, dim]; mean may be
// empty.
void RotateRow(std::span<const float> row,
               std::span<const float> mean,
               std::span<const float> rotation,
               std::span<float> out);

// One row: out = row * rotation^T.
void RotateRowBack(std::span<const float> row,
                   std::span<const float> rotation,
                   std::span<float> out);

}  // namespace crumb::reference
