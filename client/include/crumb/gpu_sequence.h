// SPDX-License-Identifier: Apache-2.0
//
// The KV cache of one live sequence in a GPU's memory: crumb/sequence.h over device pages. Which of
// its pages are sink, history and recent window, whose memory they are in, what is given back; all
// on the host. Tokens come by a GpuBatch (crumb/gpu_batch.h), which brings one or many sequences
// forward at a time.
//
// A page of an adopted prefix is read where it is: in the daemon's memory, or where UploadToGpu has
// put it. Only whole pages are shared, so a sequence's own rows always begin a page of its own, and
// nothing shared is ever written.
//
// Nothing here enqueues or waits for GPU work but Validate, as it says. Thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "crumb/client.h"
#include "crumb/gpu_page_pool.h"

namespace crumb {

class GpuSequence : public GpuPages {
 public:
  struct Options {
    GpuPagePool* pool = nullptr;     // Outlives the sequence.
    uint32_t max_tokens = 1u << 20;  // RESOURCE_EXHAUSTED beyond.
  };

  // INVALID_ARGUMENT names the option, its value and the limit.
  static absl::StatusOr<std::unique_ptr<GpuSequence>> Create(const Options& options);
  // Gives its pages back; not within a step. Of an adopted prefix: only when the last kernel that
  // reads it has ended, since its memory may be unmapped with the last handle. To let it go later,
  // keep the handle (and the upload) somewhere else.
  ~GpuSequence() override;
  GpuSequence(const GpuSequence&) = delete;
  GpuSequence& operator=(const GpuSequence&) = delete;

  // Tokens of finished steps.
  uint32_t length() const override;
  const ProfileId* profile_id() const override;
  HeadRange heads() const override;  // Of the rank.

  // Starts from a shared prefix: length() becomes its tokens, nothing is copied. Its pages are
  // those of `upload`, or without one those that the lookup found on the GPU. Layers of an upload
  // that are still on their way are waited for by the stream of the first step, layer by layer.
  // FAILED_PRECONDITION unless empty and out of a step; if the prefix is of another profile, of a
  // client on another GPU than the pool's or without some of its heads; if the upload is of another
  // prefix; or if a page is not on the GPU. Nor may the rows of the recent window be there at two
  // bits alone while the prefix has them in BF16. RESOURCE_EXHAUSTED: longer than max_tokens.
  absl::Status Adopt(std::shared_ptr<PrefixHandle> prefix,  // shared: with who else adopts it.
                     std::shared_ptr<GpuUpload> upload = nullptr);  // shared: likewise.

  // As Sequence's.
  absl::Status RetainTail(uint32_t prefix_tokens);
  void ReleaseTail();

  // Whether all that was computed for this sequence may be believed. Call it when the GPU's work of
  // a step has ended (a synchronised stream or event), before the step's outputs are used: OK
  // vouches for all steps whose work has ended by then. FAILED_PRECONDITION, DATA_LOSS: as the
  // prefix's Validate. INVALID_ARGUMENT: keys or values with NaN or inf were to be demoted, by
  // layer, head and token. The sequence is then of no use; nothing of it is ever published.
  // Blocks only for copies of an upload that are still on their way.
  absl::Status Validate() const override;

  Sequence::Footprint footprint() const;

  // For Client::PublishFromGpu: whole pages of finished steps whose work has ended. The sequence
  // must not change until the publish has returned.
  const std::byte* Page(PageIdx page, PageEncoding encoding) const override;

  class Impl;
  Impl& impl() { return *impl_; }  // For GpuBatch.

 private:
  explicit GpuSequence(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace crumb
