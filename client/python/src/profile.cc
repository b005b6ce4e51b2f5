// SPDX-License-Identifier: Apache-2.0
#include "crumb/cuda/profile.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "client/python/src/module.h"
#include "client/python/src/status.h"
#include "crumb/cuda/fit_profile.h"
#include "crumb/cuda/statistics.h"
#include "proto/base/file.h"

namespace crumb::python {
namespace {

namespace nb = nanobind;

// shared: Profile::Load gives it so, and Python's objects hold it for as long as they live.
using ProfilePtr = std::shared_ptr<const Profile>;

// The holder that Python sees, since a class of nanobind is not const.
struct PyProfile {
  ProfilePtr profile;
};

RotationKind RotationFromName(const std::string& name) {
  if (name == "head") {
    return RotationKind::kPerHead;
  }
  if (name == "layer") {
    return RotationKind::kPerLayer;
  }
  if (name == "hadamard") {
    return RotationKind::kHadamard;
  }
  // throws: the edge of Python.
  throw StatusError(absl::InvalidArgumentError(
      absl::StrCat("rotation '", name, "' is not known; 'head', 'layer' or 'hadamard' is")));
}

CodecId CodecNamed(const std::string& name) {
  const std::optional<CodecId> codec = CodecFromName(name);
  if (!codec) {
    // throws: the edge of Python.
    throw StatusError(absl::InvalidArgumentError(
        absl::StrCat("codec '", name, "' is not known; ", CodecNames(), " are")));
  }
  return *codec;
}

// options.rotation = "head" in Python, of keys or of values.
template <RotationKind FitOptions::*kRotation>
void SetRotation(FitOptions& options, const std::string& name) {
  options.*kRotation = RotationFromName(name);
}

void SetValueLevels(FitOptions& options, const std::string& name) {
  if (name != "range" && name != "deviation") {
    // throws: the edge of Python.
    throw StatusError(absl::InvalidArgumentError(
        absl::StrCat("value_levels '", name, "' is not known; 'range' or 'deviation' is")));
  }
  options.value_levels = name == "range" ? ValueLevels::kRange : ValueLevels::kDeviation;
}

void SetKeyRanges(FitOptions& options, const std::string& name) {
  if (name != "codec" && name != "narrow" && name != "chosen") {
    // throws: the edge of Python.
    throw StatusError(absl::InvalidArgumentError(
        absl::StrCat("key_ranges '", name, "' is not known; 'codec', 'narrow' or 'chosen' is")));
  }
  options.key_ranges = name == "codec"    ? KeyRangeSet::kCodec
                       : name == "narrow" ? KeyRangeSet::kNarrow
                                          : KeyRangeSet::kChosen;
}

template <uint32_t Windows::*kWindow>
void SetWindow(FitOptions& options, uint32_t tokens) {
  options.windows.*kWindow = tokens;
}

std::pair<PyProfile, std::vector<std::string>> Fit(const Statistics& statistics,
                                                   const FitOptions& options) {
  const nb::gil_scoped_release unlocked;
  FittedProfile fitted = ValueOrThrow(FitProfile(statistics, options));
  PyProfile profile{ValueOrThrow(Profile::Parse(ValueOrThrow(Profile::Serialize(fitted.parts))))};
  return std::make_pair(std::move(profile), std::move(fitted.warnings));
}

// What `crumb.profile.fit` takes by name; made there, so nobody reads it back.
void DefineFit(nb::module_& module) {
  nb::class_<FitOptions>(module, "FitOptions", "See crumb.profile.fit.")
      .def(nb::init<>())
      .def(
          "set_codec",
          [](FitOptions& self, const std::string& name) { self.codec = CodecNamed(name); },
          nb::arg("name"))
      .def("set_key_rotation", &SetRotation<&FitOptions::key_rotation>, nb::arg("name"))
      .def("set_value_rotation", &SetRotation<&FitOptions::value_rotation>, nb::arg("name"))
      .def("set_sink_tokens", &SetWindow<&Windows::sink_tokens>, nb::arg("tokens"))
      .def("set_recent_tokens", &SetWindow<&Windows::recent_tokens>, nb::arg("tokens"))
      .def("set_value_levels", &SetValueLevels, nb::arg("name"))
      .def("set_key_ranges", &SetKeyRanges, nb::arg("name"))
      .def_rw("key_clip", &FitOptions::key_clip)
      .def_rw("value_clip", &FitOptions::value_clip)
      .def_rw("shift_keys", &FitOptions::shift_keys)
      .def_rw("damping", &FitOptions::damping)
      .def_rw("choose", &FitOptions::choose)
      .def_rw("key_margin", &FitOptions::key_choice_margin)
      .def_rw("value_margin", &FitOptions::value_choice_margin)
      .def_rw("threads", &FitOptions::num_threads);
  module.def("fit_profile", &Fit, nb::arg("statistics"), nb::arg("options"));
}

PyProfile Load(const std::filesystem::path& path) {
  return {ValueOrThrow(Profile::Load(path))};
}

PyProfile Parse(const nb::bytes& file) {
  const auto* data = static_cast<const std::byte*>(file.data());
  return {ValueOrThrow(Profile::Parse({data, data + file.size()}))};
}

nb::bytes File(const PyProfile& self) {
  const std::span<const std::byte> file = self.profile->file();
  return nb::bytes(static_cast<const void*>(file.data()), file.size());
}

template <uint32_t Geometry::*kExtent>
uint32_t Extent(const PyProfile& self) {
  return self.profile->geometry().*kExtent;
}

template <uint32_t Windows::*kWindow>
uint32_t Window(const PyProfile& self) {
  return self.profile->windows().*kWindow;
}

void Write(const PyProfile& profile, const std::filesystem::path& path) {
  ThrowIfError(WriteFileAtomically(path, profile.profile->file()));
}

}  // namespace

const Profile& ProfileOf(nb::handle object) {
  return *nb::cast<const PyProfile&>(object).profile;
}

void DefineProfile(nb::module_& module) {
  nb::class_<PyProfile>(module, "Profile",
                        "All that two engines must agree on before they share a page. Immutable.")
      .def_static("load", &Load, nb::arg("path"))
      .def_static("parse", &Parse, nb::arg("file"))
      .def("write", &Write, nb::arg("path"),
           "Write its file, whole or not at all: an OSError leaves what was there.")
      .def_prop_ro("file", &File, "Its bytes, as `write` writes them.")
      .def_prop_ro(
          "id", [](const PyProfile& self) { return self.profile->id().Hex(); },
          "The SHA-256 of its file in hexadecimal digits.")
      .def_prop_ro(
          "model", [](const PyProfile& self) { return self.profile->model(); },
          "The model that it was fitted to, for people.")
      .def_prop_ro(
          "codec",
          [](const PyProfile& self) { return std::string(CodecName(self.profile->codec())); },
          "oscar-int2, oscar-int2-lm, oscar-int2-aware or oscar-int2-tilted.")
      .def_prop_ro("num_layers", &Extent<&Geometry::num_layers>, "Layers with attention.")
      .def_prop_ro("num_kv_heads", &Extent<&Geometry::num_kv_heads>, "KV heads of a layer.")
      .def_prop_ro("key_dim", &Extent<&Geometry::key_dim>, "head_dim of K.")
      .def_prop_ro("value_dim", &Extent<&Geometry::value_dim>, "head_dim of V.")
      .def_prop_ro("sink_tokens", &Window<&Windows::sink_tokens>,
                   "How many tokens at the begin stay in bfloat16.")
      .def_prop_ro("recent_tokens", &Window<&Windows::recent_tokens>,
                   "How many of the last tokens stay in bfloat16.")
      .def_prop_ro(
          "block_bytes",
          [](const PyProfile& self) { return self.profile->geometry().Int2Block().bytes(); },
          "Bytes of one page of one layer and KV head, K and V, at two bits.");
  DefineFit(module);
  module.attr("PAGE_TOKENS") = kPageTokens;
}

}  // namespace crumb::python
