// SPDX-License-Identifier: Apache-2.0
//
// A decode step as an engine makes it: through GpuBatch, layers as a replayed graph, and the engine
// waiting for its tokens at the end. Sequences have adopted their history as prefixes and hold a
// window of their own.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "bench/gpu/codec_pages.h"
#include "bench/gpu/decode_batch.h"
#include "crumb/gpu_batch.h"

namespace crumb::bench {

class EngineStep {
 public:
  struct Form {
    bool keeps_outputs_rotated = true;
    bool has_one_prefix = false;  // All sequences have adopted that of the first,
    bool reads_it_once = false;   // and layers read it once for all of them.
  };
  // History pages and layers' rows are those of `batch` and `rows`, which outlive this.
  EngineStep(const DecodeBatch& batch,
             const CodecPages& rows,
             std::shared_ptr<const Profile> profile,  // shared: as everywhere.
             const Form& form);
  ~EngineStep();
  EngineStep(const EngineStep&) = delete;
  EngineStep& operator=(const EngineStep&) = delete;

  // Medians over some 150 steps.
  struct Times {
    double step_ms = 0;      // From BeginStep until the stream has been waited for.
    double graph_ms = 0;     // Of the layers, on the device.
    double begin_us = 0;     // On the host: BeginStep,
    double end_us = 0;       // EndStep
    double validate_us = 0;  // and Validate.
    double demoting_ms = 0;  // Of a step in which a page of every sequence is demoted.
  };
  Times Run();
  // Tokens of BF16 of each sequence, when Run begins.
  uint32_t window_tokens() const { return window_tokens_; }

 private:
  void Adopt(const DecodeBatch& batch);
  void Prefill();
  void Capture();
  GpuBatch::LayerRows RowsOf(uint32_t layer) const;

  const CodecPages& rows_;
  const Form form_;
  const Geometry geometry_;
  const uint32_t num_sequences_;
  uint32_t window_tokens_ = 0;
  std::unique_ptr<GpuPagePool> pool_;
  std::unique_ptr<GpuBatch> batch_;
  std::vector<std::unique_ptr<GpuSequence>> sequences_;
  std::vector<GpuBatch::Member> members_;
  void* out_ = nullptr;
  cudaStream_t stream_ = nullptr;
  cudaGraphExec_t graph_ = nullptr;
};

}  // namespace crumb::bench
