// SPDX-License-Identifier: Apache-2.0
//
// The memory of one GPU in which one engine rank's live sequences keep their pages: INT2 pages of
// history, BF16 pages of sinks and recent windows, and the profile's rotations beside them. All of
// it is allocated at creation; afterwards pages only change hands.
//
// Order of work: a page that a sequence gives up may be the next one's at once, so kernels that use
// a pool's pages must run in the order of the calls that enqueued them. One stream for everything
// gives that; with several, the engine makes them wait for one another by events.
//
// Thread-safe. Its sequences and batches are not: each is one thread's at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "crumb/cuda/profile.h"
#include "proto/page/head_range.h"
#include "proto/page/page_format.h"
#include "proto/page/usable_length.h"

namespace crumb {

class GpuPagePool {
 public:
  struct Options {
    std::shared_ptr<const Profile> profile = nullptr;  // shared: outlives the engine's handle.
    HeadRange heads = {};                              // Of the rank; count 0: all.
    int gpu = 0;                                       // As CUDA counts them in this process.
    uint32_t int2_pages = 0;  // Of the rank's heads and all layers; 1 or more.
    uint32_t bf16_pages = 0;  // Likewise: see Bf16PagesFor.
    // What attention gives out is a mean of rotated values. False: it is rotated back, which costs
    // a launch a layer (some 2 us on an H200). True: it stays rotated, for engines that multiply
    // their output projection by the rotations once: out * R^T * W = out * (R^T * W), where R is
    // Profile::head(layer, kv_head).value_rotation and W the rows of the projection that take a
    // query head of that KV head.
    bool keeps_outputs_rotated = false;
  };

  // BF16 pages that `num_sequences` sequences need at the most at a time, if steps of up to
  // `step_tokens` tokens in all bring them forward and none retains a tail.
  static uint32_t Bf16PagesFor(const Windows& windows,
                               uint32_t num_sequences,
                               uint32_t step_tokens);

  // INVALID_ARGUMENT names the option, its value and the limit. RESOURCE_EXHAUSTED: not that much
  // device memory, with the bytes. UNIMPLEMENTED: a build without CUDA, a head_dim that kernels
  // do not have (64, 128 and 256, the same for K and V), or rows that only the CPU demotes
  // (crumb/cuda/device_profile.h).
  static absl::StatusOr<std::unique_ptr<GpuPagePool>> Create(Options options);
  // After all of its sequences and batches, and after the last kernel that uses its pages.
  ~GpuPagePool();
  GpuPagePool(const GpuPagePool&) = delete;
  GpuPagePool& operator=(const GpuPagePool&) = delete;

  const Profile& profile() const;
  HeadRange heads() const;  // Of the rank; count is never 0 here.
  int gpu() const;

  struct Usage {
    uint32_t num_pages = 0;
    uint32_t num_free = 0;
    size_t page_bytes = 0;
  };
  Usage usage(PageEncoding encoding) const;

  class Impl;
  Impl& impl() { return *impl_; }  // For GpuSequence and GpuBatch.

 private:
  explicit GpuPagePool(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace crumb
