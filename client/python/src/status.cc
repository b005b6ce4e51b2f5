// SPDX-License-Identifier: Apache-2.0
#include "client/python/src/status.h"

#include <nanobind/nanobind.h>

namespace crumb::python {
namespace {

PyObject* ExceptionOf(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kFailedPrecondition:
      return PyExc_ValueError;
    case absl::StatusCode::kNotFound:
      return PyExc_FileNotFoundError;
    case absl::StatusCode::kInternal:
      return PyExc_RuntimeError;
    default:
      return PyExc_OSError;
  }
}

void Translate(const std::exception_ptr& pointer, void* /*payload*/) {
  try {
    std::rethrow_exception(pointer);
  } catch (const StatusError& error) {
    PyErr_SetString(ExceptionOf(error.code()), error.what());
  }
}

}  // namespace

void RegisterStatusError() {
  nanobind::register_exception_translator(Translate);
}

}  // namespace crumb::python
