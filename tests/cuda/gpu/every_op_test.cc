// SPDX-License-Identifier: Apache-2.0
//
// What is true of every op: it is captured, it gives the same bytes whenever it runs, it waits for
// nothing and allocates nothing, and leaves alone what is not its own. Needs a GPU.
#include "tests/cuda/gpu/every_op.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

#include "tests/cuda/gpu/gpu_fixture.h"

namespace crumb {
namespace {

class EveryOpGpuTest : public GpuFixture<testing::Test> {
 protected:
  static std::vector<std::byte> Run(OpUnderTest& op) {
    op.Clear();
    const absl::Status status = op.Launch(nullptr);
    EXPECT_TRUE(status.ok()) << status;
    CRUMB_EXPECT_CUDA(cudaDeviceSynchronize());
    return op.Outputs();
  }
  static bool HasWritten(const std::vector<std::byte>& outputs) {
    return !std::all_of(outputs.begin(), outputs.end(),
                        [](std::byte byte) { return byte == std::byte{0xff}; });
  }
};

// First of all tests, so that it is the first launch of each kernel in the process, too.
TEST_F(EveryOpGpuTest, IsCapturedAndReplaysGiveTheBytesOfALaunch) {
  for (const auto& op : EveryOp()) {
    SCOPED_TRACE(op->name());
    op->Clear();
    CRUMB_EXPECT_CUDA(cudaDeviceSynchronize());
    const TestStream stream;
    // Global: a call that waits or allocates, on any thread, would end the capture.
    CRUMB_EXPECT_CUDA(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeGlobal));
    const absl::Status status = op->Launch(stream.get());
    EXPECT_TRUE(status.ok()) << status;
    cudaGraph_t graph = nullptr;
    CRUMB_EXPECT_CUDA(cudaStreamEndCapture(stream.get(), &graph));
    ASSERT_NE(graph, nullptr);
    size_t num_nodes = 0;
    CRUMB_EXPECT_CUDA(cudaGraphGetNodes(graph, nullptr, &num_nodes));
    std::vector<cudaGraphNode_t> nodes(num_nodes);
    CRUMB_EXPECT_CUDA(cudaGraphGetNodes(graph, nodes.data(), &num_nodes));
    EXPECT_GE(num_nodes, 1u);
    for (const cudaGraphNode_t node : nodes) {
      cudaGraphNodeType type{};
      CRUMB_EXPECT_CUDA(cudaGraphNodeGetType(node, &type));
      EXPECT_TRUE(type == cudaGraphNodeTypeKernel || type == cudaGraphNodeTypeMemset) << type;
    }
    cudaGraphExec_t executable = nullptr;
    CRUMB_EXPECT_CUDA(cudaGraphInstantiate(&executable, graph, 0));
    std::vector<std::byte> replayed;
    for (int replay = 0; replay < 3; ++replay) {
      op->Clear();
      CRUMB_EXPECT_CUDA(cudaDeviceSynchronize());
      CRUMB_EXPECT_CUDA(cudaGraphLaunch(executable, stream.get()));
      stream.Wait();
      const std::vector<std::byte> outputs = op->Outputs();
      EXPECT_TRUE(HasWritten(outputs));
      EXPECT_TRUE(replay == 0 || outputs == replayed) << "replay " << replay;
      replayed = outputs;
    }
    EXPECT_TRUE(Run(*op) == replayed);
    CRUMB_EXPECT_CUDA(cudaGraphExecDestroy(executable));
    CRUMB_EXPECT_CUDA(cudaGraphDestroy(graph));
  }
}

TEST_F(EveryOpGpuTest, IsEnqueuedBehindWorkThatHasNotEndedWithoutWaitingOrAllocating) {
  struct Gate {
    std::atomic<bool> is_open = false;
    std::atomic<bool> was_late = false;
  };
  const auto ops = EveryOp();
  std::vector<std::vector<std::byte>> expected;
  for (const auto& op : ops) {
    expected.push_back(Run(*op));
    op->Clear();
  }
  CRUMB_EXPECT_CUDA(cudaDeviceSynchronize());
  size_t free_before = 0;
  size_t free_after = 0;
  size_t total = 0;
  CRUMB_EXPECT_CUDA(cudaMemGetInfo(&free_before, &total));
  Gate gate;
  const TestStream stream;
  CRUMB_EXPECT_CUDA(cudaLaunchHostFunc(
      stream.get(),
      [](void* data) {
        auto& held = *static_cast<Gate*>(data);
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
        while (!held.is_open && !held.was_late) {
          held.was_late = std::chrono::steady_clock::now() > deadline;
          std::this_thread::yield();
        }
      },
      &gate));
  for (const auto& op : ops) {
    const absl::Status status = op->Launch(stream.get());
    EXPECT_TRUE(status.ok()) << op->name() << ": " << status;
    EXPECT_FALSE(gate.was_late) << op->name() << " waits for the stream";
  }
  CRUMB_EXPECT_CUDA(cudaMemGetInfo(&free_after, &total));
  EXPECT_EQ(free_after, free_before);
  gate.is_open = true;
  stream.Wait();
  for (size_t i = 0; i < ops.size(); ++i) {
    EXPECT_TRUE(ops[i]->Outputs() == expected[i]) << ops[i]->name();
  }
}

// An error of the engine's own, which it has not looked at yet, is not an op's. (CUDA itself
// forgets it where a launch asks for shared memory.)
TEST_F(EveryOpGpuTest, IsNotBlamedForAnErrorThatWasThereBefore) {
  for (const auto& op : EveryOp()) {
    SCOPED_TRACE(op->name());
    const std::vector<std::byte> expected = Run(*op);
    op->Clear();
    CRUMB_EXPECT_CUDA(cudaDeviceSynchronize());
    void* nothing = nullptr;
    EXPECT_EQ(cudaMalloc(&nothing, size_t{1} << 60), cudaErrorMemoryAllocation);
    const absl::Status status = op->Launch(nullptr);
    EXPECT_TRUE(status.ok()) << status;
    cudaGetLastError();
    CRUMB_EXPECT_CUDA(cudaDeviceSynchronize());
    EXPECT_TRUE(op->Outputs() == expected);
  }
}

}  // namespace
}  // namespace crumb
