// SPDX-License-Identifier: Apache-2.0
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

#include "client/python/src/arrays.h"
#include "client/python/src/module.h"
#include "client/python/src/status.h"
#include "crumb/cuda/demote.h"
#include "crumb/cuda/expand.h"
#include "crumb/cuda/rotate.h"

namespace crumb::python {
namespace {

namespace nb = nanobind;

void CheckLayer(const Profile& profile, uint32_t layer) {
  if (layer >= profile.geometry().num_layers) {
    ThrowIfError(absl::InvalidArgumentError(
        absl::StrCat("layer ", layer, " is not of the profile, which has layers 0 to ",
                     profile.geometry().num_layers - 1)));
  }
}

// The number of query heads that share a KV head.
size_t GroupOf(const Profile& profile, const char* name, const HeadArray& rows) {
  const size_t kv_heads = profile.geometry().num_kv_heads;
  if (rows.heads() == 0 || rows.heads() % kv_heads != 0) {
    ThrowIfError(absl::InvalidArgumentError(absl::StrCat(name, " has ", rows.heads(),
                                                         " heads; a multiple of the profile's ",
                                                         kv_heads, " KV heads is expected")));
  }
  return rows.heads() / kv_heads;
}

using RotateRows = void (*)(const HeadParameters&,
                            std::span<const float>,
                            std::span<BFloat16>,
                            CpuPath);
using RotateFloats = void (*)(const HeadParameters&,
                              std::span<const float>,
                              std::span<float>,
                              CpuPath);

// keys or values [H, T, dim] -> bfloat16 [H, T, dim].
template <RotateRows kRotate, bool kKeys>
void StoreRows(nb::handle py_profile, uint32_t layer, const Input& rows, const Output& out) {
  const Profile& profile = ProfileOf(py_profile);
  CheckLayer(profile, layer);
  const Geometry& geometry = profile.geometry();
  const HeadArray source =
      HeadArray::FloatOrBfloat16(rows, {.name = kKeys ? "keys" : "values",
                                        .heads = geometry.num_kv_heads,
                                        .columns = kKeys ? geometry.key_dim : geometry.value_dim});
  const HeadArray target = HeadArray::Of(
      Element::kBfloat16, out,
      {.name = "out", .heads = source.heads(), .rows = source.rows(), .columns = source.columns()});
  const nb::gil_scoped_release unlocked;
  std::vector<float> scratch;
  for (uint32_t head = 0; head < geometry.num_kv_heads; ++head) {
    kRotate(profile.head(layer, head), source.AsFloats(head, &scratch), target.MutableBfloats(head),
            BestCpuPath());
  }
}

// queries or outputs [Hq, T, dim] -> float32 [Hq, T, dim].
template <RotateFloats kRotate, bool kQueries>
void TurnRows(nb::handle py_profile, uint32_t layer, const Input& rows, const Output& out) {
  const Profile& profile = ProfileOf(py_profile);
  CheckLayer(profile, layer);
  const Geometry& geometry = profile.geometry();
  constexpr const char* kName = kQueries ? "queries" : "outputs";
  const HeadArray source = HeadArray::FloatOrBfloat16(
      rows, {.name = kName, .columns = kQueries ? geometry.key_dim : geometry.value_dim});
  const size_t group = GroupOf(profile, kName, source);
  const HeadArray target = HeadArray::Of(
      Element::kFloat32, out,
      {.name = "out", .heads = source.heads(), .rows = source.rows(), .columns = source.columns()});
  const nb::gil_scoped_release unlocked;
  std::vector<float> scratch;
  for (size_t head = 0; head < source.heads(); ++head) {
    kRotate(profile.head(layer, static_cast<uint32_t>(head / group)),
            source.AsFloats(head, &scratch), target.MutableFloats(head), BestCpuPath());
  }
}

// Rotated rows, whole pages of them, to two bits: [H, T, dim] -> uint8 [H, T / 64, block bytes].
void Demote(nb::handle py_profile,
            uint32_t layer,
            const Input& py_keys,
            const Input& py_values,
            const Output& out) {
  const Profile& profile = ProfileOf(py_profile);
  CheckLayer(profile, layer);
  const Geometry& geometry = profile.geometry();
  const HeadArray keys =
      HeadArray::Of(Element::kBfloat16, py_keys,
                    {.name = "keys", .heads = geometry.num_kv_heads, .columns = geometry.key_dim});
  const HeadArray values = HeadArray::Of(Element::kBfloat16, py_values,
                                         {.name = "values",
                                          .heads = geometry.num_kv_heads,
                                          .rows = keys.rows(),
                                          .columns = geometry.value_dim});
  if (keys.rows() % kPageTokens != 0) {
    ThrowIfError(absl::InvalidArgumentError(absl::StrCat(
        "keys has ", keys.rows(), " rows; whole pages of ", kPageTokens,
        " are demoted, so keep the last ", keys.rows() % kPageTokens, " in bfloat16")));
  }
  const size_t pages = keys.rows() / kPageTokens;
  const size_t block_bytes = geometry.Int2Block().bytes();
  const HeadArray target = HeadArray::Of(
      Element::kUint8, out,
      {.name = "out", .heads = geometry.num_kv_heads, .rows = pages, .columns = block_bytes});
  const nb::gil_scoped_release unlocked;
  for (uint32_t head = 0; head < geometry.num_kv_heads; ++head) {
    for (size_t page = 0; page < pages; ++page) {
      const size_t row = page * kPageTokens;
      const absl::Status status = DemoteHeadBlock(
          profile.head(layer, head),
          keys.Bfloats(head).subspan(row * keys.columns(), kPageTokens * keys.columns()),
          values.Bfloats(head).subspan(row * values.columns(), kPageTokens * values.columns()),
          target.MutableBytes(head).subspan(page * block_bytes, block_bytes));
      if (!status.ok()) {
        ThrowIfError(
            absl::Status(status.code(), absl::StrCat("layer ", layer, ", KV head ", head,
                                                     ", rows from ", row, ": ", status.message())));
      }
    }
  }
}

// uint8 [H, N, block bytes] -> bfloat16 [H, 64 N, dim], of keys and of values.
void Expand(nb::handle py_profile,
            uint32_t layer,
            const Input& py_pages,
            bool rotated,
            const Output& keys_out,
            const Output& values_out) {
  const Profile& profile = ProfileOf(py_profile);
  CheckLayer(profile, layer);
  const Geometry& geometry = profile.geometry();
  const size_t heads = geometry.num_kv_heads;
  const size_t block_bytes = geometry.Int2Block().bytes();
  const HeadArray pages = HeadArray::Of(Element::kUint8, py_pages,
                                        {.name = "pages", .heads = heads, .columns = block_bytes});
  const size_t rows = pages.rows() * kPageTokens;
  const HeadArray keys =
      HeadArray::Of(Element::kBfloat16, keys_out,
                    {.name = "keys", .heads = heads, .rows = rows, .columns = geometry.key_dim});
  const HeadArray values = HeadArray::Of(
      Element::kBfloat16, values_out,
      {.name = "values", .heads = heads, .rows = rows, .columns = geometry.value_dim});
  const ExpandSpace space = rotated ? ExpandSpace::kRotated : ExpandSpace::kModel;
  const nb::gil_scoped_release unlocked;
  for (uint32_t head = 0; head < heads; ++head) {
    for (size_t page = 0; page < pages.rows(); ++page) {
      const size_t row = page * kPageTokens;
      ExpandHeadBlock(
          profile.head(layer, head), pages.Bytes(head).subspan(page * block_bytes, block_bytes),
          space,
          keys.MutableBfloats(head).subspan(row * keys.columns(), kPageTokens * keys.columns()),
          values.MutableBfloats(head).subspan(row * values.columns(),
                                              kPageTokens * values.columns()));
    }
  }
}

}  // namespace

void DefineCodec(nb::module_& module) {
  const auto define = [&](const char* name, auto function) {
    module.def(name, function, nb::arg("profile"), nb::arg("layer"), nb::arg("rows"),
               nb::arg("out"));
  };
  define("rotate_keys", &StoreRows<&RotateKeys, true>);
  define("rotate_values", &StoreRows<&RotateValues, false>);
  define("rotate_queries", &TurnRows<&RotateQueries, true>);
  define("unrotate_outputs", &TurnRows<&UnrotateOutputs, false>);
  module.def("demote", &Demote, nb::arg("profile"), nb::arg("layer"), nb::arg("keys"),
             nb::arg("values"), nb::arg("out"));
  module.def("expand", &Expand, nb::arg("profile"), nb::arg("layer"), nb::arg("pages"),
             nb::arg("rotated"), nb::arg("keys"), nb::arg("values"));
}

}  // namespace crumb::python
