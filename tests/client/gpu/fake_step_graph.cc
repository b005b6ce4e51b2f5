// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include "proto/base/check.h"
#include "tests/client/gpu/step_graph.h"
#include "tests/support/fake_gpu.h"

namespace crumb {
namespace {

class FakeStepGraph : public StepGraph {
 public:
  explicit FakeStepGraph(const std::function<void(GpuStream)>& enqueue) {
    FakeGpu::Capture(&work_);
    enqueue(nullptr);
    FakeGpu::Capture(nullptr);
  }
  void Launch(GpuStream /*stream*/) override {
    for (const FakeGpu::Work& work : work_) {
      CRUMB_CHECK(FakeGpu::Enqueue("launching a graph", work).ok(), "a test's graph is launched");
    }
  }

 private:
  std::vector<FakeGpu::Work> work_;
};

}  // namespace

std::unique_ptr<StepGraph> StepGraph::Capture(const std::function<void(GpuStream)>& enqueue) {
  return std::make_unique<FakeStepGraph>(enqueue);
}

}  // namespace crumb
