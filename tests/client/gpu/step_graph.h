// SPDX-License-Identifier: Apache-2.0
//
// Work that is captured once and launched many times: a CUDA graph, or on the pretended GPU
// (fake_gpu.cc) the list of what was enqueued.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "crumb/cuda/device.h"

namespace crumb {

class StepGraph {
 public:
  virtual ~StepGraph() = default;
  virtual void Launch(GpuStream stream) = 0;

  uint32_t num_rows = 0;  // Of a GpuBatch that it was captured with.

  // What `enqueue` puts on the stream that it is given, instead of doing it.
  static std::unique_ptr<StepGraph> Capture(const std::function<void(GpuStream)>& enqueue);
};

}  // namespace crumb
