// SPDX-License-Identifier: Apache-2.0
#include "client/python/src/module.h"

#include "client/python/src/status.h"

NB_MODULE(_native, module) {
  crumb::python::RegisterStatusError();
  crumb::python::DefineProfile(module);
  crumb::python::DefineCodec(module);
  crumb::python::DefineAttention(module);
  crumb::python::DefineStatistics(module);
}
