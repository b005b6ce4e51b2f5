// SPDX-License-Identifier: Apache-2.0
//
// The rotation files that OSCAR publishes (arXiv 2605.17757, github.com/FutureMLS-Lab/OSCAR), one
// of keys and one of values a model: torch.save of
//
//   {"format_version": 1 or 2, "objective": text, "source_grouping": "layer" or "per_kv_head",
//    "layers": {layer id: {"layer_id": the same, "rotation": tensor, "eigenvalues": tensor}}}
//
// Version 1 has one rotation [d, d] a layer, version 2 one a KV head, [H, d, d]. Rows are rotated
// as row * rotation, as here. Layer ids are the model's: those of layers without attention are left
// out. Eigenvalues are for people and not read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "cuda/checkpoint/torch_file.h"

namespace crumb::checkpoint {

struct RotationCheckpoint {
  std::string objective;            // Such as "qqt_r_h_pbr"; for people.
  bool is_per_head = false;         // Version 2.
  uint32_t num_heads = 1;           // KV heads; 1 for version 1, which does not know.
  uint32_t dim = 0;                 // A head_dim of Geometry.
  std::vector<uint32_t> layer_ids;  // Ascending, below kMaxLayerId; at least one.
  std::vector<float> rotations;     // [layers, num_heads, dim, dim], finite; else not checked.
};

inline constexpr uint32_t kMaxLayerId = 1 << 16;

// INVALID_ARGUMENT names the path, the layer, what it has and what was expected: see TorchFile;
// also other versions, shapes that differ between layers, more layers or heads than Geometry
// allows. NOT_FOUND: no such file.
absl::StatusOr<RotationCheckpoint> LoadRotationCheckpoint(const std::filesystem::path& path);
absl::StatusOr<RotationCheckpoint> ReadRotationCheckpoint(const TorchFile& file);

}  // namespace crumb::checkpoint
