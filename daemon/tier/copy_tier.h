// SPDX-License-Identifier: Apache-2.0
//
// A tier beside the host arena that holds copies of its pages: a GPU's memory. Every page has its
// home in the host arena, and copies are dropped without loss; so the tier decides about speed and
// never about what is there.
//
// Its memory comes in segments of one size, all allocated when it is made. A segment belongs to one
// namespace and encoding at a time, as a chunk does, and is exchanged for fresh memory before it
// may belong to another: who has the old one mapped goes on seeing what it saw, and nothing else.
//
// Knows neither pages nor leases: which segment holds what is the store's. Thread-safe for
// different segments; Share may be called at any time for a segment that is not being renewed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "proto/base/unique_fd.h"
#include "proto/page/geometry.h"

namespace crumb {

// Where heads of a page image lie in the tier.
struct CopyPlace {
  uint32_t segment = 0;
  size_t offset = 0;  // In the segment.
};

// Heads of one page image on their way into the tier.
struct PageCopy {
  CopyPlace place;
  std::span<const std::byte> source;  // Adjacent head ranges of one size.
  std::vector<uint32_t> head_crc32c;  // Of each of them.
};

class CopyTier {
 public:
  virtual ~CopyTier() = default;

  // In words, for the log and `crumbctl status`.
  virtual std::string Description() const = 0;
  virtual size_t segment_bytes() const = 0;
  // [0, num_segments()) are the segments.
  virtual uint32_t num_segments() const = 0;
  // UNIMPLEMENTED: pages of this geometry are of no use there; the message says why.
  virtual absl::Status CheckGeometry(const Geometry& geometry) const = 0;

  // A descriptor by which a process of this node maps the segment: the caller's own. Quick: called
  // under the store's mutex.
  virtual absl::StatusOr<UniqueFd> Share(uint32_t segment) const = 0;
  // Has the device read host memory by itself, which makes copies from there faster, as long as the
  // result lives: at the longest until the memory is unmapped. Whole pages of the machine, which
  // may be read-only. Null: it does not. Takes milliseconds. shared: only to hide what it is.
  virtual std::shared_ptr<const void> Hold(std::span<const std::byte> memory) const = 0;
  // Exchanges the segment's memory for fresh one, all zero. RESOURCE_EXHAUSTED: there is none now;
  // the segment is then not to be used until a later call succeeds. Blocking.
  virtual absl::Status Renew(uint32_t segment) = 0;
  // Copies, and compares the checksums of what has arrived; one status a copy. DATA_LOSS, naming
  // head and both checksums, or the device's error. Blocking.
  virtual std::vector<absl::Status> Write(std::span<const PageCopy> copies) = 0;
};

}  // namespace crumb
