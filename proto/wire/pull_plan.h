// SPDX-License-Identifier: Apache-2.0
//
// The stream of a pull: the order in which its bytes travel and, since they are received in place,
// how they lie in the puller's memory. Both ends compute it from the same request.
//
//   [PageHeader x entries][layer 0: entry 0: head blocks, entry 1: head blocks, ...][layer 1 ...]
//
// A page image is [kv_head][layer]; a stream is [layer][entry][kv_head], so that layer 0 of all
// pages is there after one part in num_layers of the bytes. The daemon gathers the stream into
// messages of one size, whatever the size of head blocks, pages and the number of layers. Why: see
// docs/decisions/0060-pull-stream.md.
//
// An immutable value; Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "proto/page/geometry.h"
#include "proto/page/page_header.h"

namespace crumb {

class PullPlan {
 public:
  // One page encoding an entry, at least one. The geometry has only the KV heads that travel, and
  // all heads below count from 0 among them.
  PullPlan(const Geometry& geometry, std::vector<PageEncoding> encodings);

  const Geometry& geometry() const { return geometry_; }
  uint32_t num_entries() const { return static_cast<uint32_t>(encodings_.size()); }
  PageEncoding encoding(uint32_t entry) const { return encodings_[entry]; }
  size_t block_bytes(uint32_t entry) const { return geometry_.HeadBlockBytes(encodings_[entry]); }

  // Offsets in the stream. Multiples of 512, since headers and head blocks of format v1 are.
  size_t total_bytes() const { return LayerEnd(geometry_.num_layers - 1); }
  static size_t HeaderOffset(uint32_t entry) { return size_t{entry} * sizeof(PageHeader); }
  size_t BlockOffset(uint32_t layer, uint32_t entry, uint32_t head) const {
    return LayerBegin(layer) + entry_offsets_[entry] + head * block_bytes(entry);
  }
  size_t LayerBegin(uint32_t layer) const { return headers_bytes() + layer * layer_bytes_; }
  size_t LayerEnd(uint32_t layer) const { return LayerBegin(layer) + layer_bytes_; }

  // What the sender has of each entry: its header, and the image of the heads that travel.
  struct Source {
    const PageHeader* header = nullptr;
    const std::byte* image = nullptr;
  };
  // Copies bytes [offset, offset + target.size()) of the stream. One source an entry. The range
  // must lie within the stream.
  void Gather(std::span<const Source> sources, size_t offset, std::span<std::byte> target) const;

 private:
  size_t headers_bytes() const { return encodings_.size() * sizeof(PageHeader); }
  // The piece that holds byte `offset` of the stream: where it is at its sender, from that byte on.
  std::span<const std::byte> PieceAt(std::span<const Source> sources, size_t offset) const;

  Geometry geometry_;
  std::vector<PageEncoding> encodings_;
  std::vector<size_t> entry_offsets_;  // Of each entry within a layer, ascending.
  size_t layer_bytes_ = 0;
};

}  // namespace crumb
