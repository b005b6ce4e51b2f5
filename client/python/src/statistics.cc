// SPDX-License-Identifier: Apache-2.0
#include "crumb/cuda/statistics.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "client/python/src/module.h"
#include "client/python/src/status.h"
#include "proto/base/file.h"

namespace crumb::python {
namespace {

namespace nb = nanobind;

// A float32 array [T, heads, dim], dense.
using Rows = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

std::span<const float> Floats(const Rows& rows) {
  return {rows.data(), rows.size()};
}

// NOLINTNEXTLINE(readability-function-size): Python passes them by name.
void Construct(StatisticsCollector* self,
               std::string model,
               uint32_t num_layers,
               uint32_t num_kv_heads,
               uint32_t num_query_heads,
               uint32_t key_dim,
               uint32_t value_dim,
               std::vector<uint32_t> attention_windows) {
  new (self) StatisticsCollector(ValueOrThrow(
      StatisticsCollector::Create({.model = std::move(model),
                                   .geometry = {.num_layers = num_layers,
                                                .num_kv_heads = num_kv_heads,
                                                .key_dim = key_dim,
                                                .value_dim = value_dim},
                                   .num_query_heads = num_query_heads,
                                   .attention_windows = std::move(attention_windows)})));
}

StatisticsCollector Resume(const Statistics& statistics) {
  return ValueOrThrow(StatisticsCollector::Resume(statistics));
}

void AddText(StatisticsCollector& collector,
             uint32_t layer,
             const Rows& queries,
             const Rows& keys,
             const Rows& values) {
  const nb::gil_scoped_release unlocked;
  ThrowIfError(collector.AddText(layer, Floats(queries), Floats(keys), Floats(values)));
}

void Write(const Statistics& statistics, const std::filesystem::path& path) {
  const nb::gil_scoped_release unlocked;
  ThrowIfError(WriteFileAtomically(path, ValueOrThrow(Statistics::Serialize(statistics))));
}

// A tensor of the statistics as a read-only array of NumPy's that keeps them alive.
using Tensor = nb::ndarray<nb::numpy, const double>;

enum Of { kKeys, kValues };

// [L, H, d] or [L, H, d, d].
template <std::vector<double> Statistics::*kField, Of kOf, size_t kAxes>
Tensor Get(nb::handle self) {
  const auto& statistics = nb::cast<const Statistics&>(self);
  const Geometry& geometry = statistics.geometry;
  const size_t dim = kOf == kValues ? geometry.value_dim : geometry.key_dim;
  const size_t shape[] = {geometry.num_layers, geometry.num_kv_heads, dim, dim};
  return Tensor((statistics.*kField).data(), kAxes, shape, self);
}

}  // namespace

void DefineStatistics(nb::module_& module) {
  nb::class_<Statistics>(module, "Statistics",
                         "Moments of a model's queries, keys and values, by layer and KV head.")
      .def_static(
          "load",
          [](const std::filesystem::path& path) { return ValueOrThrow(Statistics::Load(path)); })
      .def("write", &Write, nb::arg("path"),
           "Write them, whole or not at all: an OSError leaves what was there.")
      .def_ro("model", &Statistics::model)
      .def_prop_ro("num_layers", [](const Statistics& self) { return self.geometry.num_layers; })
      .def_prop_ro("num_kv_heads",
                   [](const Statistics& self) { return self.geometry.num_kv_heads; })
      .def_prop_ro("key_dim", [](const Statistics& self) { return self.geometry.key_dim; })
      .def_prop_ro("value_dim", [](const Statistics& self) { return self.geometry.value_dim; })
      .def_ro("num_query_heads", &Statistics::num_query_heads)
      .def_ro("num_texts", &Statistics::num_texts)
      .def_ro("num_tokens", &Statistics::num_tokens)
      .def_ro("attention_windows", &Statistics::attention_windows,
              "How many keys a query of each layer sees; 0: all before it.")
      .def_prop_ro("num_reservoir_keys",
                   [](const Statistics& self) { return self.reservoir.key_tokens.size(); })
      .def_prop_ro("num_reservoir_queries",
                   [](const Statistics& self) { return self.reservoir.query_tokens.size(); })
      .def_prop_ro("query_moment", &Get<&Statistics::query_moment, kKeys, 4>)
      .def_prop_ro("query_mean", &Get<&Statistics::query_mean, kKeys, 3>)
      .def_prop_ro("key_moment", &Get<&Statistics::key_moment, kKeys, 4>)
      .def_prop_ro("key_mean", &Get<&Statistics::key_mean, kKeys, 3>)
      .def_prop_ro("value_moment", &Get<&Statistics::value_moment, kValues, 4>)
      .def_prop_ro("value_mean", &Get<&Statistics::value_mean, kValues, 3>)
      .def_prop_ro("value_covariance", &Get<&Statistics::value_covariance, kValues, 4>)
      .def_prop_ro("value_attention_covariance",
                   &Get<&Statistics::value_attention_covariance, kValues, 4>);

  nb::class_<StatisticsCollector>(module, "StatisticsCollector",
                                  "Sums up statistics, a layer of a whole text at a time.")
      .def("__init__", &Construct, nb::kw_only(), nb::arg("model"), nb::arg("num_layers"),
           nb::arg("num_kv_heads"), nb::arg("num_query_heads"), nb::arg("key_dim"),
           nb::arg("value_dim"), nb::arg("attention_windows") = std::vector<uint32_t>())
      .def_static("resume", &Resume, nb::arg("statistics"),
                  "A collector that goes on where the one that gave these was.")
      .def("add_text", &AddText, nb::arg("layer"), nb::arg("queries"), nb::arg("keys"),
           nb::arg("values"))
      .def("finish", [](const StatisticsCollector& self) { return ValueOrThrow(self.Finish()); });

  module.attr("FIRST_QUERY_TOKEN") = Statistics::kFirstQueryToken;
}

}  // namespace crumb::python
