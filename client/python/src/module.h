// SPDX-License-Identifier: Apache-2.0
//
// The parts of the extension module crumb._native. The package's Python files wrap them: those hold
// the documentation, and make the arrays that results are written to.
#pragma once

#include <nanobind/nanobind.h>

#include "crumb/cuda/profile.h"

namespace crumb::python {

// The profile inside of a Python object; a TypeError in Python if it is none.
const Profile& ProfileOf(nanobind::handle object);
void DefineProfile(nanobind::module_& module);
void DefineCodec(nanobind::module_& module);
void DefineAttention(nanobind::module_& module);
void DefineStatistics(nanobind::module_& module);

}  // namespace crumb::python
