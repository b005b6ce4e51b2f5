// SPDX-License-Identifier: Apache-2.0
//
// An engine that has started, and is asked for a prompt that somebody else has computed: it looks
// the prompt up, takes its pages over and decodes one token, all layers. What lies between layers
// in an engine, its matrix products, is not here. Errors end the program.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "bench/gpu/service_scene.h"
#include "crumb/client.h"
#include "crumb/gpu_batch.h"

namespace crumb::bench {

// Where the pages are when the token is decoded.
enum class PagesFrom {
  kGpu,   // Read in place, in the daemon's memory on the same GPU. Layers are a replayed graph.
  kHost,  // Copied from the daemon's memory on the host, layer by layer before they are read.
  kUcx,   // Pulled over UCX, then copied likewise.
};

class FirstTokenEngine {
 public:
  FirstTokenEngine(std::shared_ptr<const Profile> profile, PagesFrom from);
  ~FirstTokenEngine();
  FirstTokenEngine(const FirstTokenEngine&) = delete;
  FirstTokenEngine& operator=(const FirstTokenEngine&) = delete;

  struct Times {
    double lookup_ms = 0;
    double ms = 0;            // From the call of the lookup to the end of the step, validated.
    size_t copied_bytes = 0;  // To the GPU.
  };
  // All tokens of `prompt` but the last are found, and one step begins with the last.
  Times Run(Client* client, std::span<const uint32_t> prompt);

 private:
  void Capture();
  void WarmUp();
  GpuBatch::LayerRows rows() const;
  void Step(GpuSequence* sequence);

  const PagesFrom from_;
  std::unique_ptr<GpuPagePool> pool_;
  std::unique_ptr<GpuBatch> batch_;
  std::byte* rows_ = nullptr;  // [query, key and value heads, head_dim] bf16, then the outputs.
  cudaStream_t stream_ = nullptr;
  cudaGraphExec_t graph_ = nullptr;
};

}  // namespace crumb::bench
