// SPDX-License-Identifier: Apache-2.0
//
// A looked-up prefix on the engine's GPU, all of it: pages that the daemon has in that GPU's memory
// in place, the others copied from host memory. Copies run at the bus's speed on a stream of their
// own, in order of layers, so that decoding of layer 0 begins while later layers are on their way.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"

#include "crumb/cuda/device.h"
#include "proto/base/ids.h"
#include "proto/page/page_format.h"

namespace crumb {

class PrefixHandle;

struct GpuUploadOptions {
  // Copied together, with one event: fewer start decoding earlier, more copy in longer runs.
  uint32_t layers_per_group = 4;
};

// Thread-compatible. Its prefix must outlive it, and no kernel may read its pages when it is
// destroyed, which waits for its own copies.
class GpuUpload {
 public:
  virtual ~GpuUpload() = default;

  // What was uploaded.
  virtual const PrefixHandle& prefix() const = 0;
  // As PrefixHandle::GpuPage, for every page in every encoding that the lookup gave; only the head
  // blocks of the rank's heads may be read. Null: not given in that encoding.
  virtual const std::byte* Page(PageIdx page, PageEncoding encoding) const = 0;
  // What is enqueued on `stream` from now on waits until layers [0, layer] are there. Does not
  // block. INVALID_ARGUMENT: the stream is of another GPU, or there is no such layer.
  virtual absl::Status DelayUntilLayer(uint32_t layer, GpuStream stream) const = 0;
  // Copied to the device; pages read in place do not count.
  virtual size_t copied_bytes() const = 0;
  // Whether the device reads the mapped host memory by itself. If not, why: copies then go by way
  // of the driver's buffers, at a fraction of the speed.
  virtual const absl::Status& registration() const = 0;
  // Blocks until all is copied. OK only if the copies were made without an error and have the
  // pages' checksums (which the GPU computes, once, where ClientOptions::verify_mapped_pages asks
  // for it), and the prefix's own Validate says OK after them: what was computed counts only then.
  virtual absl::Status Validate() = 0;
};

}  // namespace crumb
