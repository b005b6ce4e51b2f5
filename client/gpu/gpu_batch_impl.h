// SPDX-License-Identifier: Apache-2.0
//
// A batch behind its public face: the protocol of a step (gpu_batch_step.cc) and what a layer
// enqueues (gpu_batch_layer.cc).
#pragma once

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "client/gpu/gpu_page_pool_impl.h"
#include "client/gpu/gpu_sequence_impl.h"
#include "client/gpu/step_tables.h"
#include "crumb/cuda/prefill_attention.h"
#include "crumb/cuda/shared_decode.h"
#include "crumb/cuda/split_decode.h"
#include "crumb/cuda/transfer.h"
#include "crumb/gpu_batch.h"

namespace crumb {

// Thread-compatible.
class GpuBatch::Impl {
 public:
  // `options` are checked and complete: scale and max_tokens are not 0.
  static absl::StatusOr<std::unique_ptr<Impl>> Create(const Options& options);
  ~Impl() { AbandonStep(); }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  absl::Status BeginStep(const Step& step, GpuStream stream);
  absl::Status Layer(uint32_t layer, const LayerRows& rows, GpuStream stream);
  absl::Status DecodeLayer(uint32_t layer,
                           uint32_t num_rows,
                           bool reads_prefix_once,
                           const LayerRows& rows,
                           GpuStream stream);
  bool shares_prefix() const { return shares_prefix_; }
  absl::Status EndStep(GpuStream stream);
  void AbandonStep();
  absl::Status Validate() const;
  absl::Status TakeProblem(GpuStream stream);

 private:
  explicit Impl(const Options& options);

  absl::StatusOr<size_t> WorkspaceBytes() const;
  const Geometry& geometry() const { return pool_.geometry(); }
  int gpu() const { return pool_.options().gpu; }

  // Of BeginStep.
  absl::Status CheckMembers(std::span<const Member> members) const;
  absl::Status CheckMember(const Member& member) const;
  absl::Status CheckReplay(const Step& step) const;
  bool MembersSharePrefix() const;
  absl::Status Reserve(std::span<const Member> members);
  absl::Status Prepare(GpuStream stream);
  absl::Status DemoteOverdue(GpuStream stream);
  void FillTables();

  // Of a layer.
  absl::Status CheckLayer(const char* call, uint32_t layer, const LayerRows& rows) const;
  AppendRowsParams Append(uint32_t layer, const LayerRows& rows, uint32_t num_tokens) const;
  SplitDecodeParams Decode(uint32_t layer, uint32_t num_rows, void* out) const;
  absl::Status EnqueueDecode(const SplitDecodeParams& params,
                             uint32_t layer,
                             bool reads_prefix_once,
                             GpuStream stream) const;
  PrefillAttentionParams Prefill(uint32_t layer,
                                 uint32_t index,
                                 uint32_t first_token,
                                 void* out) const;
  DevicePageTable History(uint32_t layer, uint32_t row) const;
  DevicePageTable Windows(uint32_t layer, uint32_t row) const;
  // Where attention writes: `out`, or where it is rotated back from.
  void* Attended(void* out) const { return attended_ == nullptr ? out : attended_; }
  absl::Status FinishOutputs(uint32_t layer,
                             uint32_t num_tokens,
                             void* out,
                             GpuStream stream) const;

  template <typename T>
  T* OnDevice(size_t offset) const {
    return reinterpret_cast<T*>(device_->data() + offset);
  }

  const Options options_;
  GpuPagePool::Impl& pool_;
  const StepTables::Shape shape_;
  // Pinned image of the tables; on the device the tables, then the other buffers.
  std::unique_ptr<OwnPinnedMemory> host_;
  std::unique_ptr<OwnGpuMemory> device_;
  std::unique_ptr<StepTables> tables_;
  std::unique_ptr<OwnGpuEvent> copied_;  // The host's image may be written again.
  void* rotated_queries_ = nullptr;      // [max_tokens, num_query_heads, head_dim]
  void* attended_ = nullptr;             // Likewise; null: outputs stay rotated.
  uint64_t* tokens_left_out_ = nullptr;
  uint64_t* null_pages_ = nullptr;
  std::byte* workspace_ = nullptr;
  size_t workspace_bytes_ = 0;

  std::vector<Member> members_;  // Of the step begun last.
  bool is_open_ = false;
  bool is_replayed_ = false;
  bool shares_prefix_ = false;
  bool reads_prefix_once_ = false;  // By Layer.
  uint32_t num_decoded_ = 0;        // Members of one token, which come first.
  uint64_t history_tokens_ = 0;     // Of those.
  std::vector<bool> enqueued_;      // By layer.
  // Scratch.
  std::vector<const std::byte*> windows_;
  std::vector<uint32_t> num_windows_;  // By member: pages.
  std::vector<GpuPageTable::Demotion> demotions_;
};

}  // namespace crumb
