// SPDX-License-Identifier: Apache-2.0
//
// The one header of an engine that keeps its KV cache on a GPU: a pool of pages, sequences, and
// here the steps that bring sequences forward together, decoding a token each or prefilling a
// chunk.
//
//   batch->BeginStep({.members = members}, stream);      host; enqueues table updates
//   for each layer: batch->Layer(layer, rows, stream);   or one replay of a captured graph
//   batch->EndStep(stream);                              host; enqueues demotion
//   ... the engine waits for `stream`, as it does for its tokens ...
//   batch->Validate();                                   host; may the step be believed?
//
// Nothing of this waits for the GPU, allocates its memory or synchronises a stream, with one
// exception: BeginStep blocks while the stream has not come to the step before it. So an engine may
// be one step ahead: begin step n + 1 before it has waited for step n. `length()` of a sequence
// moves at EndStep, on the host; all work is in the stream's order.
//
// CUDA graphs. Lengths, slots and page tables are read from device memory at addresses that never
// change, so what DecodeLayer enqueues for all layers is captured once for each number of rows that
// the engine pads to, and replayed for any members, lengths and pages. BeginStep and EndStep stay
// outside of the graph, on the stream that it is launched on.
//
// Streams are of the pool's GPU, whatever the current one is; others are INVALID_ARGUMENT.
//
// Thread-compatible: one thread at a time for a batch and the sequences in its step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "crumb/cuda/append_rows.h"
#include "crumb/cuda/decode_params.h"
#include "crumb/cuda/device.h"
#include "crumb/gpu_page_pool.h"
#include "crumb/gpu_sequence.h"

namespace crumb {

class GpuBatch {
 public:
  struct Options {
    GpuPagePool* pool = nullptr;   // Outlives the batch.
    uint32_t num_query_heads = 0;  // Of the rank; a multiple of its KV heads, 16 times at most.
    float scale = 0;               // Of the scores; 0: 1 / sqrt(head_dim).
    uint32_t max_sequences = 0;    // Of a step: rows of the tables. At most 32,768.
    uint32_t max_tokens = 0;       // Of a step, over all members; at most 32,768. 0: max_sequences.
    uint32_t max_length = 1u << 17;         // Tokens of a member.
    ElementType type = ElementType::kBf16;  // Of queries, keys and values; or kFp16.
    // As `type`; with GpuPagePool::Options::keeps_outputs_rotated any.
    ElementType out_type = ElementType::kBf16;
    // Steps that are captured will mostly have kLongHistoryTokens of history or more: attention
    // may then begin to read while append_rows runs. Steps that are not captured know.
    bool captures_long_history = false;
  };
  // From where on it was measured to pay: docs/decisions/0117.
  static constexpr uint64_t kLongHistoryTokens = 32'768;

  // INVALID_ARGUMENT names the option, its value and the limit. RESOURCE_EXHAUSTED: no memory for
  // its tables and buffers, with the bytes.
  static absl::StatusOr<std::unique_ptr<GpuBatch>> Create(const Options& options);
  // Abandons an open step. After the last kernel of the batch has ended.
  ~GpuBatch();
  GpuBatch(const GpuBatch&) = delete;
  GpuBatch& operator=(const GpuBatch&) = delete;

  struct Member {
    GpuSequence* sequence = nullptr;
    uint32_t num_tokens = 1;
  };
  struct Step {
    // Member i is row i; its tokens follow those of the members before it. Members that bring one
    // token come first. Members may change from step to step; a sequence that keeps its row costs
    // nothing, one that comes to a row has its page table copied there.
    std::span<const Member> members;
    // 0: layers are enqueued by Layer. Else they are a graph's that was captured with so many rows,
    // at least as many as there are members, which bring one token each.
    uint32_t replayed_rows = 0;
    // Of steps by Layer: as by DecodeSharedLayer, where shares_prefix().
    bool reads_prefix_once = false;
  };
  // Takes pages for the step's tokens and for what they push out of the windows, and enqueues
  // copies of lengths and tables. All or nothing: RESOURCE_EXHAUSTED, naming the member, when the
  // pool has no more pages or a length passes its limit; INVALID_ARGUMENT, FAILED_PRECONDITION for
  // members that cannot make a step.
  absl::Status BeginStep(const Step& step, GpuStream stream);

  // A layer's rows of all tokens of the step in their order, on the device. What is read need not
  // be dense between tokens: slices of a fused tensor of Q, K and V will do.
  struct LayerRows {
    TokenRows queries;    // [num_tokens, num_query_heads, head_dim], after RoPE.
    TokenRows keys;       // [num_tokens, num_kv_heads, head_dim], after RoPE.
    TokenRows values;     // [num_tokens, num_kv_heads, head_dim]
    void* out = nullptr;  // [num_tokens, num_query_heads, head_dim] of out_type, dense.
  };
  // Enqueues one layer of the open step: keys and values go into their pages, each query attends to
  // its sequence up to its own token. Layers in any order, each once.
  absl::Status Layer(uint32_t layer, const LayerRows& rows, GpuStream stream);
  // The same for rows [0, num_rows) of one token each, for capture: needs no open step, and reads
  // of the step that is open when it runs. Rows beyond the step's members are padding: their out
  // is 0.
  absl::Status DecodeLayer(uint32_t layer,
                           uint32_t num_rows,
                           const LayerRows& rows,
                           GpuStream stream);
  // The same in another form: where shares_prefix(), the history that the members have adopted is
  // read once for all of them, which for 32 sequences on 100,000 tokens takes less than half of the
  // time. It is right for any step, and slower where they share nothing. Outputs differ by up to
  // 1e-3 of the largest |v| (crumb/cuda/shared_decode.h); those of padding mean nothing.
  // UNIMPLEMENTED: the device is not of compute capability 9.0.
  absl::Status DecodeSharedLayer(uint32_t layer,
                                 uint32_t num_rows,
                                 const LayerRows& rows,
                                 GpuStream stream);

  // Whether the members of the step begun last, two or more of one token each, have adopted one
  // prefix (the same handle, and the same upload): which of two graphs to launch.
  bool shares_prefix() const;

  // Closes the step: lengths move on, and pages that left a recent window are demoted, those of all
  // members in one launch. FAILED_PRECONDITION: no step, or a layer was not enqueued. After an
  // error the step is still open, to be abandoned.
  absl::Status EndStep(GpuStream stream);
  // Drops the open step as if it had not been begun; what was enqueued of it may still run. No-op
  // without one.
  void AbandonStep();

  // GpuSequence::Validate for all members of the step begun last, each prefix once; they must still
  // be there. The error of the first that fails, naming it; ask the sequences for the others. An
  // engine that is a step ahead asks the sequences of the step that has ended, by their own.
  absl::Status Validate() const;

  // What launches found wrong in the tables, which is a fault of this library or of who wrote to
  // its memory. Waits for `stream`; for tests and debugging. INTERNAL.
  absl::Status TakeProblem(GpuStream stream);

  class Impl;

 private:
  explicit GpuBatch(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace crumb
