// SPDX-License-Identifier: Apache-2.0
#include "bench/gpu/gpu_timer.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace crumb::bench {

void CheckCuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
    std::exit(1);
  }
}

double GraphMilliseconds(const std::function<void(cudaStream_t)>& enqueue, int replays) {
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  CheckCuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "creating a stream");
  CheckCuda(cudaEventCreate(&begin), "creating an event");
  CheckCuda(cudaEventCreate(&end), "creating an event");
  CheckCuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capturing");
  enqueue(stream);
  CheckCuda(cudaStreamEndCapture(stream, &graph), "ending a capture");
  CheckCuda(cudaGraphInstantiate(&executable, graph, 0), "instantiating a graph");
  std::vector<double> times;
  for (int i = 0; i < replays + 2; ++i) {
    CheckCuda(cudaEventRecord(begin, stream), "recording an event");
    CheckCuda(cudaGraphLaunch(executable, stream), "launching a graph");
    CheckCuda(cudaEventRecord(end, stream), "recording an event");
    CheckCuda(cudaEventSynchronize(end), "waiting for a graph");
    float milliseconds = 0;
    CheckCuda(cudaEventElapsedTime(&milliseconds, begin, end), "reading an event");
    if (i >= 2) {
      times.push_back(double{milliseconds});
    }
  }
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaStreamDestroy(stream);
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

}  // namespace crumb::bench
