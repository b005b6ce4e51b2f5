// SPDX-License-Identifier: Apache-2.0
//
// A test that needs two GPUs says so and is skipped where there are fewer. The first is current.
#pragma once

#include "gtest/gtest.h"

#include "tests/cuda/gpu/device_buffer.h"

namespace crumb {

template <typename Base>
class TwoGpuFixture : public Base {
 protected:
  void SetUp() override {
    int num_devices = 0;
    if (cudaGetDeviceCount(&num_devices) != cudaSuccess || num_devices < 2) {
      cudaGetLastError();
      GTEST_SKIP() << "needs two GPUs, there is " << num_devices;
    }
    CRUMB_EXPECT_CUDA(cudaSetDevice(0));
  }
};

}  // namespace crumb
