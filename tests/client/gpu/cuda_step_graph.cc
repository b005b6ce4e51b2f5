// SPDX-License-Identifier: Apache-2.0
#include "tests/client/gpu/step_graph.h"
#include "tests/cuda/gpu/device_buffer.h"

namespace crumb {
namespace {

class CudaStepGraph : public StepGraph {
 public:
  explicit CudaStepGraph(const std::function<void(GpuStream)>& enqueue) {
    const TestStream stream;
    CRUMB_EXPECT_CUDA(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeGlobal));
    enqueue(stream.get());
    CRUMB_EXPECT_CUDA(cudaStreamEndCapture(stream.get(), &graph_));
    CRUMB_EXPECT_CUDA(cudaGraphInstantiate(&executable_, graph_, 0));
  }
  ~CudaStepGraph() override {
    cudaGraphExecDestroy(executable_);
    cudaGraphDestroy(graph_);
  }
  CudaStepGraph(const CudaStepGraph&) = delete;
  CudaStepGraph& operator=(const CudaStepGraph&) = delete;

  void Launch(GpuStream stream) override {
    CRUMB_EXPECT_CUDA(cudaGraphLaunch(executable_, stream));
  }

 private:
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace

std::unique_ptr<StepGraph> StepGraph::Capture(const std::function<void(GpuStream)>& enqueue) {
  return std::make_unique<CudaStepGraph>(enqueue);
}

}  // namespace crumb
