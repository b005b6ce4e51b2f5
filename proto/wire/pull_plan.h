// SPDX-License-Identifier: Apache-2.0
//
// The stream of a pull: the order in which its bytes travel and, since they are received in place,
// how they lie in the puller's memory. Both ends compute it from the same request.
//
//   [PageHeader x entries][layer 0: entry 0: head blocks, entry 1: head blocks, ...][layer 1 ...]
//   [image of entry 0][image of entry 1] ...
//
// A page image is [kv_head][layer]. The first `ordered_layers` layers are [layer][entry][kv_head],
// so that layer 0 of all pages is there long before the last byte; their sender gathers them. When
// they are not all layers, the images of the heads that travel follow as they lie in their sender's
// memory, the first layers among them once more: sending a few bytes twice costs less than leaving
// them out. Why: see docs/decisions/0060-pull-stream.md.
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
  static constexpr uint32_t kGathered = UINT32_MAX;

  // How the stream is laid out and cut into messages.
  struct Cut {
    uint32_t ordered_layers = 0;  // 1..num_layers
    uint32_t chunk_bytes = 0;     // At least 1.
  };
  // A part of the stream that does not travel in parts. What is gathered is cut into chunk_bytes;
  // an image into equal parts of about as many, so one of less than 1.5 times that travels whole. A
  // message is a piece, or several of images that follow each other in the stream.
  struct Piece {
    size_t offset = 0;           // In the stream.
    size_t bytes = 0;            // Never 0.
    uint32_t entry = kGathered;  // Of whose image it is a part.
    size_t image_offset = 0;     // In that image.
  };

  // One page encoding an entry, at least one. The geometry has only the KV heads that travel, and
  // all heads below count from 0 among them.
  PullPlan(const Geometry& geometry, std::vector<PageEncoding> encodings, const Cut& cut);

  const Geometry& geometry() const { return geometry_; }
  const Cut& cut() const { return cut_; }
  uint32_t num_entries() const { return static_cast<uint32_t>(encodings_.size()); }
  PageEncoding encoding(uint32_t entry) const { return encodings_[entry]; }
  size_t block_bytes(uint32_t entry) const { return geometry_.HeadBlockBytes(encodings_[entry]); }

  // Offsets in the stream. Multiples of 512, since headers and head blocks of format v1 are.
  size_t total_bytes() const { return image_offsets_.back(); }
  static size_t HeaderOffset(uint32_t entry) { return size_t{entry} * sizeof(PageHeader); }
  // Where a block is to be read: for each, one place, even if it travels twice.
  size_t BlockOffset(uint32_t layer, uint32_t entry, uint32_t head) const {
    return layer < cut_.ordered_layers
               ? LayerBegin(layer) + entry_offsets_[entry] + head * block_bytes(entry)
               : image_offsets_[entry] + geometry_.HeadBlockOffset(encodings_[entry], layer, head);
  }
  // Layers [0, layer] are there with the first so many bytes.
  size_t BytesUntil(uint32_t layer) const {
    return layer < cut_.ordered_layers ? LayerBegin(layer + 1) : total_bytes();
  }
  size_t headers_bytes() const { return encodings_.size() * sizeof(PageHeader); }

  size_t num_pieces() const { return image_pieces_.back(); }
  Piece PieceAt(size_t number) const;
  size_t num_gathered_pieces() const { return image_pieces_.front(); }
  // The number of the piece that holds a byte of the stream.
  size_t PieceOf(size_t offset) const;
  // Those that a message of `bytes` bytes at `offset` would consist of; none when it cannot be one.
  struct Pieces {
    size_t begin = 0;
    size_t end = 0;
  };
  Pieces PiecesIn(size_t offset, size_t bytes) const;

  // What the sender has of each entry: its header, and the image of the heads that travel.
  struct Source {
    const PageHeader* header = nullptr;
    const std::byte* image = nullptr;
  };
  // Copies bytes [offset, offset + target.size()) of the gathered part of the stream. One source an
  // entry. The range must lie within that part.
  void Gather(std::span<const Source> sources, size_t offset, std::span<std::byte> target) const;

 private:
  size_t gathered_bytes() const { return image_offsets_.front(); }
  size_t LayerBegin(uint32_t layer) const { return headers_bytes() + layer * layer_bytes_; }
  size_t image_bytes(uint32_t entry) const {
    return image_offsets_[entry + 1] - image_offsets_[entry];
  }
  size_t NumParts(uint32_t entry) const { return image_pieces_[entry + 1] - image_pieces_[entry]; }
  // Where a part of an image begins; the part after the last begins at its end.
  size_t PartBegin(uint32_t entry, size_t part) const {
    return image_bytes(entry) * part / NumParts(entry);
  }
  // The run that holds byte `offset` of the stream: where it is at its sender, from that byte on.
  std::span<const std::byte> RunAt(std::span<const Source> sources, size_t offset) const;

  Geometry geometry_;
  std::vector<PageEncoding> encodings_;
  Cut cut_;
  std::vector<size_t> entry_offsets_;  // Of each entry within an ordered layer, ascending.
  size_t layer_bytes_ = 0;
  std::vector<size_t> image_offsets_;  // Of each entry's image in the stream, and the stream's end.
  std::vector<size_t> image_pieces_;   // The number of its first piece, and the number of pieces.
};

}  // namespace crumb
