// SPDX-License-Identifier: Apache-2.0
//
// Split attention over one layer's KV heads. Arrays are head after head, as PyTorch's attention has
// them; the kernel takes a KV head's query heads together, token after token, so queries and
// outputs are laid out anew on the way.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "client/python/src/arrays.h"
#include "client/python/src/module.h"
#include "client/python/src/status.h"
#include "crumb/cuda/split_attention.h"
#include "proto/base/status_macros.h"

namespace crumb::python {
namespace {

namespace nb = nanobind;

using PyWindows = std::vector<std::pair<Input, Input>>;  // (keys, values) of each run of rows.

struct Problem {
  HeadArray queries;                  // [Hq, n, dk]
  HeadArray pages;                    // [H, N, block bytes]
  HeadArray out;                      // [Hq, n, dv]
  std::optional<HeadArray> lse = {};  // [Hq, n, 1]
  std::vector<HeadArray> window_keys = {};
  std::vector<HeadArray> window_values = {};
  float scale = 0;
  size_t group = 0;
  size_t value_dim = 0;
};

// One KV head of the problem.
absl::Status Attend(const Problem& problem, size_t kv_head) {
  const size_t group = problem.group;
  const size_t num_queries = problem.queries.rows();
  const size_t key_dim = problem.queries.columns();
  const size_t value_dim = problem.value_dim;
  std::vector<float> queries(num_queries * group * key_dim);
  for (size_t member = 0; member < group; ++member) {
    const auto rows = problem.queries.Floats(kv_head * group + member);
    for (size_t token = 0; token < num_queries; ++token) {
      std::copy_n(&rows[token * key_dim], key_dim, &queries[(token * group + member) * key_dim]);
    }
  }
  std::vector<const std::byte*> history(problem.pages.rows());
  for (size_t page = 0; page < history.size(); ++page) {
    history[page] = problem.pages.Bytes(kv_head).data() + page * problem.pages.columns();
  }
  std::vector<Bf16Rows> windows;
  for (size_t i = 0; i < problem.window_keys.size(); ++i) {
    windows.push_back({.keys = problem.window_keys[i].Bfloats(kv_head).data(),
                       .values = problem.window_values[i].Bfloats(kv_head).data(),
                       .num_tokens = static_cast<uint32_t>(problem.window_keys[i].rows())});
  }
  std::vector<float> out(num_queries * group * value_dim);
  std::vector<float> lse(problem.lse ? num_queries * group : 0);
  CRUMB_RETURN_IF_ERROR(SplitAttention({.key_dim = static_cast<uint32_t>(key_dim),
                                        .value_dim = static_cast<uint32_t>(value_dim),
                                        .num_queries = static_cast<uint32_t>(num_queries),
                                        .group = static_cast<uint32_t>(group),
                                        .scale = problem.scale,
                                        .queries = queries.data(),
                                        .history = history,
                                        .windows = windows,
                                        .out = out.data(),
                                        .lse = lse.empty() ? nullptr : lse.data()}));
  for (size_t member = 0; member < group; ++member) {
    const auto rows = problem.out.MutableFloats(kv_head * group + member);
    for (size_t token = 0; token < num_queries; ++token) {
      std::copy_n(&out[(token * group + member) * value_dim], value_dim, &rows[token * value_dim]);
      if (problem.lse) {
        problem.lse->MutableFloats(kv_head * group + member)[token] = lse[token * group + member];
      }
    }
  }
  return absl::OkStatus();
}

void AddWindows(const PyWindows& windows, size_t heads, Problem* problem) {
  for (const auto& [py_keys, py_values] : windows) {
    const HeadArray keys = HeadArray::Of(
        Element::kBfloat16, py_keys,
        {.name = "a window's keys", .heads = heads, .columns = problem->queries.columns()});
    const HeadArray values = HeadArray::Of(Element::kBfloat16, py_values,
                                           {.name = "a window's values",
                                            .heads = heads,
                                            .rows = keys.rows(),
                                            .columns = problem->value_dim});
    problem->window_keys.push_back(keys);
    problem->window_values.push_back(values);
  }
}

// NOLINTNEXTLINE(readability-function-size): Python passes them by name.
void AttendAll(nb::handle py_profile,
               const Input& queries,
               const Input& pages,
               const PyWindows& windows,
               float scale,
               const Output& out,
               const std::optional<Output>& lse) {
  const Geometry& geometry = ProfileOf(py_profile).geometry();
  const size_t heads = geometry.num_kv_heads;
  const HeadArray query_rows =
      HeadArray::Of(Element::kFloat32, queries, {.name = "queries", .columns = geometry.key_dim});
  const size_t query_heads = query_rows.heads();
  if (query_heads == 0 || query_heads % heads != 0) {
    ThrowIfError(absl::InvalidArgumentError(absl::StrCat("queries has ", query_heads,
                                                         " heads; a multiple of the profile's ",
                                                         heads, " KV heads is expected")));
  }
  Problem problem = {
      .queries = query_rows,
      .pages =
          HeadArray::Of(Element::kUint8, pages,
                        {.name = "pages", .heads = heads, .columns = geometry.Int2Block().bytes()}),
      .out = HeadArray::Of(Element::kFloat32, out,
                           {.name = "out",
                            .heads = query_heads,
                            .rows = query_rows.rows(),
                            .columns = geometry.value_dim}),
      .scale = scale,
      .group = query_heads / heads,
      .value_dim = geometry.value_dim};
  if (lse) {
    problem.lse = HeadArray::Of(
        Element::kFloat32, *lse,
        {.name = "lse", .heads = query_heads, .rows = query_rows.rows(), .columns = 1});
  }
  AddWindows(windows, heads, &problem);
  const nb::gil_scoped_release unlocked;
  for (size_t head = 0; head < heads; ++head) {
    ThrowIfError(Attend(problem, head));
  }
}

}  // namespace

void DefineAttention(nb::module_& module) {
  module.def("attend", &AttendAll, nb::arg("profile"), nb::arg("queries"), nb::arg("pages"),
             nb::arg("windows"), nb::arg("scale"), nb::arg("out"), nb::arg("lse").none());
}

}  // namespace crumb::python
