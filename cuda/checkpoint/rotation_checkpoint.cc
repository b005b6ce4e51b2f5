// SPDX-License-Identifier: Apache-2.0
#include "cuda/checkpoint/rotation_checkpoint.h"

#include <map>
#include <utility>

#include "absl/strings/str_cat.h"

#include "cuda/profile/safetensors.h"
#include "proto/base/file.h"
#include "proto/base/status_macros.h"
#include "proto/page/geometry.h"

namespace crumb::checkpoint {
namespace {

constexpr size_t kMaxObjectiveBytes = 64;

template <typename... Parts>
absl::Status Refuse(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat("rotation checkpoint: ", parts...));
}

// The value of this type under `key`; `where` is "layer 3: " or nothing.
template <typename Value>
absl::StatusOr<const Value*> Field(const PickleTree& tree,
                                   const PickleDict& dict,
                                   const std::string& where,
                                   const char* key) {
  const PickleValue* found = tree.Find(dict, key);
  const std::string expected(TypeName(PickleValue(Value{})));
  if (found == nullptr) {
    return Refuse(where, "'", key, "' is missing; ", expected, " is expected");
  }
  const auto* value = std::get_if<Value>(found);
  if (value == nullptr) {
    return Refuse(where, "'", key, "' is ", std::string(TypeName(*found)), "; ", expected,
                  " is expected");
  }
  return value;
}

absl::Status ReadHeader(const PickleTree& tree, const PickleDict& root, RotationCheckpoint* out) {
  CRUMB_ASSIGN_OR_RETURN(const int64_t* version, Field<int64_t>(tree, root, "", "format_version"));
  CRUMB_ASSIGN_OR_RETURN(const std::string* grouping,
                         Field<std::string>(tree, root, "", "source_grouping"));
  CRUMB_ASSIGN_OR_RETURN(const std::string* objective,
                         Field<std::string>(tree, root, "", "objective"));
  if (*version != 1 && *version != 2) {
    return Refuse("'format_version' is ", *version, "; 1 and 2 are known");
  }
  out->is_per_head = *version == 2;
  const std::string expected = out->is_per_head ? "per_kv_head" : "layer";
  if (*grouping != expected) {
    return Refuse("'source_grouping' is '", Printable(*grouping), "'; in version ", *version,
                  " it is '", expected, "'");
  }
  if (objective->size() > kMaxObjectiveBytes) {
    return Refuse("'objective' has ", objective->size(), " bytes; at most ", kMaxObjectiveBytes,
                  " are read");
  }
  out->objective = *objective;
  return absl::OkStatus();
}

// By layer id, each checked against the key that it stands under.
absl::StatusOr<std::map<uint32_t, const PickleDict*>> LayersById(const PickleTree& tree,
                                                                 const PickleDict& layers) {
  std::map<uint32_t, const PickleDict*> by_id;
  for (const auto& [key, value] : layers.items) {
    const auto* id = tree.Get<int64_t>(key);
    const auto* layer = tree.Get<PickleDict>(value);
    if (id == nullptr || layer == nullptr) {
      return Refuse("'layers' has ", std::string(TypeName(tree.values[key])), " with ",
                    std::string(TypeName(tree.values[value])),
                    "; layer ids, which are integers, with a dict each are expected");
    }
    if (*id < 0 || *id >= kMaxLayerId) {
      return Refuse("layer id ", *id, " is not from 0 to ", kMaxLayerId - 1);
    }
    const std::string where = absl::StrCat("layer ", *id, ": ");
    CRUMB_ASSIGN_OR_RETURN(const int64_t* own, Field<int64_t>(tree, *layer, where, "layer_id"));
    if (*own != *id) {
      return Refuse(where, "'layer_id' is ", *own, "; it must be the key that it stands under");
    }
    if (!by_id.emplace(static_cast<uint32_t>(*id), layer).second) {
      return Refuse(where, "it is there twice");
    }
  }
  if (by_id.empty() || by_id.size() > Geometry::kMaxLayers) {
    return Refuse("it has ", by_id.size(), " layers; 1 to ", Geometry::kMaxLayers, " are expected");
  }
  return by_id;
}

// Sets the heads and the dim by the first layer's shape.
absl::Status ReadShape(uint32_t layer, std::span<const uint64_t> shape, RotationCheckpoint* out) {
  const size_t rank = out->is_per_head ? 3 : 2;
  const bool is_square = shape.size() == rank && shape[rank - 1] == shape[rank - 2];
  if (!is_square || shape[rank - 1] > kMaxHeadDim ||
      !IsValidHeadDim(static_cast<uint32_t>(shape[rank - 1])) ||
      (out->is_per_head && shape[0] - 1 >= Geometry::kMaxKvHeads)) {
    return Refuse("layer ", layer, ": 'rotation' is ", ShapeText(shape), "; ",
                  out->is_per_head ? "[KV heads, d, d]" : "[d, d]",
                  " is expected, d a multiple of 32 from 32 to ", kMaxHeadDim,
                  out->is_per_head ? absl::StrCat(", KV heads at most ", Geometry::kMaxKvHeads)
                                   : std::string());
  }
  out->dim = static_cast<uint32_t>(shape[rank - 1]);
  out->num_heads = out->is_per_head ? static_cast<uint32_t>(shape[0]) : 1;
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<RotationCheckpoint> ReadRotationCheckpoint(const TorchFile& file) {
  const PickleTree& tree = file.tree();
  const auto* root = tree.Get<PickleDict>(tree.root);
  if (root == nullptr) {
    return Refuse("the file holds ", std::string(TypeName(tree.values[tree.root])),
                  "; a dict with 'format_version' and 'layers' is expected");
  }
  RotationCheckpoint checkpoint;
  CRUMB_RETURN_IF_ERROR(ReadHeader(tree, *root, &checkpoint));
  CRUMB_ASSIGN_OR_RETURN(const PickleDict* layers, Field<PickleDict>(tree, *root, "", "layers"));
  CRUMB_ASSIGN_OR_RETURN(const auto by_id, LayersById(tree, *layers));
  std::vector<uint64_t> first_shape;
  for (const auto& [id, layer] : by_id) {
    const std::string where = absl::StrCat("layer ", id, ": ");
    CRUMB_ASSIGN_OR_RETURN(const PickleTensor* tensor,
                           Field<PickleTensor>(tree, *layer, where, "rotation"));
    if (first_shape.empty()) {
      CRUMB_RETURN_IF_ERROR(ReadShape(id, tensor->shape, &checkpoint));
      first_shape = tensor->shape;
    }
    if (tensor->shape != first_shape) {
      return Refuse(where, "'rotation' is ", ShapeText(tensor->shape), ", that of layer ",
                    by_id.begin()->first, " ", ShapeText(first_shape),
                    "; models whose layers differ in their attention have no profile");
    }
    CRUMB_ASSIGN_OR_RETURN(
        const std::vector<float> floats,
        file.Floats(*tensor, absl::StrCat("rotation checkpoint: ", where, "'rotation'")));
    checkpoint.rotations.insert(checkpoint.rotations.end(), floats.begin(), floats.end());
    checkpoint.layer_ids.push_back(id);
  }
  return checkpoint;
}

absl::StatusOr<RotationCheckpoint> LoadRotationCheckpoint(const std::filesystem::path& path) {
  CRUMB_ASSIGN_OR_RETURN(const std::vector<std::byte> bytes,
                         ReadFile(path, TorchFile::kMaxFileBytes));
  const absl::StatusOr<TorchFile> file = TorchFile::Parse(bytes);
  absl::StatusOr<RotationCheckpoint> checkpoint =
      file.ok() ? ReadRotationCheckpoint(*file) : file.status();
  if (!checkpoint.ok()) {
    return absl::Status(checkpoint.status().code(),
                        absl::StrCat(path.string(), ": ", checkpoint.status().message()));
  }
  return checkpoint;
}

}  // namespace crumb::checkpoint
