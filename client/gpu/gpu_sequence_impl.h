// SPDX-License-Identifier: Apache-2.0
//
// A sequence as its batch sees it: pages, and the protocol of a step.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/status.h"

#include "client/gpu/gpu_page_pool_impl.h"
#include "client/gpu/gpu_page_table.h"
#include "crumb/gpu_sequence.h"

namespace crumb {

// Thread-compatible.
class GpuSequence::Impl {
 public:
  explicit Impl(const Options& options);

  uint64_t id() const { return id_; }
  const GpuPagePool::Impl& pool() const { return pool_; }
  uint32_t length() const { return length_; }
  const GpuPageTable& pages() const { return pages_; }
  // One answer of Validate is for both, but for their own pages.
  bool SharesPrefixWith(const Impl& other) const {
    return prefix_ == other.prefix_ && upload_ == other.upload_;
  }

  // The pages of history that it shares with all that adopted its prefix.
  std::span<const std::byte* const> adopted_history() const {
    return pages_.history().first(pages_.num_adopted_history());
  }

  std::span<const std::byte* const> own_history() const {
    return pages_.history().subspan(pages_.num_adopted_history());
  }

  // shared: both with who else adopts the prefix.
  absl::Status Adopt(std::shared_ptr<PrefixHandle> prefix, std::shared_ptr<GpuUpload> upload);
  absl::Status RetainTail(uint32_t prefix_tokens);
  void ReleaseTail() { pages_.ReleaseRetained(); }
  absl::Status Validate() const;
  // Of the demotions alone.
  absl::Status ValidatePages() const { return pool_.CheckPages(pages_); }
  Sequence::Footprint footprint() const;

  // A step, in this order. 0: not in one.
  uint32_t step_tokens() const { return step_tokens_; }
  absl::Status BeginStep(uint32_t num_tokens);
  GpuPageTable& step_pages() { return pages_; }
  // Has `stream` wait until layers [0, layer] of the prefix are there, where they may not be.
  absl::Status DelayUntilLayer(uint32_t layer, GpuStream stream) const;
  void EndStep();
  void AbandonStep();

 private:
  absl::Status CheckPrefix(const PrefixHandle& prefix, const GpuUpload* upload) const;

  GpuPagePool::Impl& pool_;
  const uint64_t id_;
  const uint32_t max_tokens_;
  GpuPageTable pages_;
  // shared: both with who else adopts the prefix. The upload goes first.
  std::shared_ptr<PrefixHandle> prefix_;
  std::shared_ptr<GpuUpload> upload_;
  bool upload_is_awaited_ = false;  // By the stream, all of it.
  uint32_t length_ = 0;
  uint32_t step_tokens_ = 0;
};

}  // namespace crumb
