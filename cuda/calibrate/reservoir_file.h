// SPDX-License-Identifier: Apache-2.0
//
// The reservoir's part of a statistics file; see reservoir.h and statistics.h. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"

#include "crumb/cuda/reservoir.h"
#include "cuda/profile/safetensors.h"
#include "proto/page/geometry.h"

namespace crumb::calibrate {

// Whether a number of a file is a whole one that a uint32_t holds.
bool IsCount(double number);

// Takes the reservoir's tensors out of `contents`; none at all is an empty reservoir.
// INVALID_ARGUMENT names the tensor: one that is missing beside others, another shape, more rows
// than there is room for, tokens out of order, NaN or infinity.
absl::Status ReadReservoir(const Geometry& geometry, Safetensors* contents, Reservoir* reservoir);

// The tokens as the file has them, which must outlive what they were added to.
struct ReservoirTokens {
  explicit ReservoirTokens(const Reservoir& reservoir);

  std::vector<double> keys;  // [Rk, 2]
  std::vector<double> queries;
};
// INVALID_ARGUMENT names the rows whose size is not that of their tokens.
absl::Status AddReservoir(const Geometry& geometry,
                          const Reservoir& reservoir,
                          const ReservoirTokens& tokens,
                          Safetensors* contents);

// Adds a tensor that views `data`. INVALID_ARGUMENT: another number of elements than its shape.
absl::Status Add(const char* name,
                 TensorType type,
                 std::vector<uint64_t> shape,
                 std::span<const std::byte> data,
                 Safetensors* contents);

}  // namespace crumb::calibrate
