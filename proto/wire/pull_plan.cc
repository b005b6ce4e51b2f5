// SPDX-License-Identifier: Apache-2.0
#include "proto/wire/pull_plan.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "proto/base/check.h"

namespace crumb {

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
  while (!target.empty()) {
    const std::span<const std::byte> piece = PieceAt(sources, offset);
    const size_t bytes = std::min(piece.size(), target.size());
    std::memcpy(target.data(), piece.data(), bytes);
    target = target.subspan(bytes);
    offset += bytes;
  }
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
