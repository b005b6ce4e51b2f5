// SPDX-License-Identifier: Apache-2.0
//
// A test that needs a GPU says so and is skipped where there is none.
#pragma once

#include "gtest/gtest.h"

#include "crumb/cuda/device.h"

namespace crumb {

template <typename Base>
class GpuFixture : public Base {
 protected:
  void SetUp() override {
    if (const auto device = CurrentGpu(); !device.ok()) {
      GTEST_SKIP() << device.status();
    }
  }
};

}  // namespace crumb
