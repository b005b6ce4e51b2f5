// SPDX-License-Identifier: Apache-2.0
#include "daemon/demote/head_rows.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"

#include "crumb/cuda/demote.h"
#include "proto/base/bfloat16.h"
#include "proto/base/crc32c.h"
#include "proto/base/status_macros.h"
#include "proto/base/streaming_copy.h"

namespace crumb {
namespace {

absl::string_view EncodingName(StagedEncoding encoding) {
  switch (encoding) {
    case StagedEncoding::kInt2:
      return "INT2";
    case StagedEncoding::kBf16:
      return "BF16";
    case StagedEncoding::kBf16Plain:
      return "plain BF16";
  }
  return "unknown";
}

uint32_t FirstToken(PageIdx page) {
  return page.value() * kPageTokens;
}

absl::Status NotFinite(const StagedPage& staged,
                       uint32_t layer,
                       uint32_t head,
                       uint32_t token,
                       absl::string_view what) {
  return absl::InvalidArgumentError(
      absl::StrCat(Name(staged), ": ", what, " of layer ", layer, ", KV head ", head, ", token ",
                   FirstToken(staged.page) + token, " is not finite; such a page is not kept"));
}

constexpr uint16_t kHalfExponent = 0x7c00;  // All of its bits set: inf or NaN.

// Of one block. Without a branch, it vectorises.
bool AllMetaFinite(const Int2HeadBlock& layout, const std::byte* block) {
  static_assert(Int2HeadBlock::meta_bytes() % sizeof(uint16_t) == 0);
  std::array<uint16_t, 2 * Int2HeadBlock::meta_bytes() / sizeof(uint16_t)> meta{};
  std::memcpy(meta.data(), block + layout.key_meta_offset(), sizeof(meta));
  uint16_t carries = 0;  // Bit 15: from exponents of all ones.
  for (const uint16_t value : meta) {
    carries |= static_cast<uint16_t>((value & 0x7fffu) + 0x0400u);
  }
  return carries < 0x8000;
}

}  // namespace

std::string Name(const StagedPage& staged) {
  return absl::StrCat("staged page ", staged.page.value(), " (", EncodingName(staged.encoding),
                      ")");
}

size_t HeadBytes(const PageOwner& owner, PageEncoding encoding) {
  return owner.profile.geometry().HeadRangeBytes(encoding);
}

absl::Status CopyHeadChecked(const PageOwner& owner,
                             const StagedPage& staged,
                             uint32_t head,
                             std::span<const std::byte> staging,
                             std::span<std::byte> target) {
  const auto source = staging.subspan(staged.offset + head * target.size(), target.size());
  const uint32_t crc = staged.encoding == StagedEncoding::kInt2
                           ? StreamingCopyWithCrc32c(source, target)
                           : CopyWithCrc32c(source, target);
  if (crc != staged.head_crc32c[head]) {
    return absl::DataLossError(absl::StrFormat(
        "%s, KV head %u: checksum %08x over the bytes read, %08x was announced; stage the page "
        "again, and leave it alone until the commit returns",
        Name(staged), owner.heads.first + head, crc, staged.head_crc32c[head]));
  }
  return absl::OkStatus();
}

absl::Status CheckRows(const PageOwner& owner,
                       const StagedPage& staged,
                       uint32_t head,
                       std::span<const std::byte> rows) {
  const auto* values = reinterpret_cast<const BFloat16*>(rows.data());
  const size_t num_values = rows.size() / sizeof(BFloat16);
  if (AllFinite(values, num_values)) {
    return absl::OkStatus();
  }
  const Geometry& geometry = owner.profile.geometry();
  const size_t block_elements = geometry.Bf16Block().bytes() / sizeof(BFloat16);
  const size_t key_elements = size_t{kPageTokens} * geometry.key_dim;
  const auto* bad =
      std::find_if(values, values + num_values, [](BFloat16 value) { return !value.IsFinite(); });
  const auto index = static_cast<size_t>(bad - values);
  const size_t element = index % block_elements;
  const bool is_key = element < key_elements;
  const size_t token =
      is_key ? element / geometry.key_dim : (element - key_elements) / geometry.value_dim;
  return NotFinite(staged, static_cast<uint32_t>(index / block_elements), owner.heads.first + head,
                   static_cast<uint32_t>(token), is_key ? "an element of K" : "an element of V");
}

// The scale and minimum of each row, in fp16.
absl::Status CheckFiniteMeta(const PageOwner& owner,
                             const StagedPage& staged,
                             std::span<const std::byte> image) {
  const Geometry& geometry = owner.profile.geometry();
  const Int2HeadBlock layout = geometry.Int2Block();
  for (size_t block = 0; block < image.size() / layout.bytes(); ++block) {
    const std::byte* bytes = image.data() + block * layout.bytes();
    if (AllMetaFinite(layout, bytes)) {
      continue;
    }
    for (uint32_t token = 0; token < kPageTokens; ++token) {
      for (const bool is_key : {true, false}) {
        uint16_t meta[2];
        std::memcpy(meta,
                    bytes + (is_key ? layout.KeyMetaByte(token) : layout.ValueMetaByte(token)),
                    sizeof(meta));
        if ((meta[0] & kHalfExponent) == kHalfExponent ||
            (meta[1] & kHalfExponent) == kHalfExponent) {
          return NotFinite(staged, static_cast<uint32_t>(block % geometry.num_layers),
                           owner.heads.first + static_cast<uint32_t>(block / geometry.num_layers),
                           token, is_key ? "the scale of K" : "the scale of V");
        }
      }
    }
  }
  return absl::OkStatus();
}

absl::Status StoreRows(const PageOwner& owner,
                       const StagedPage& staged,
                       uint32_t head,
                       std::span<const std::byte> rows,
                       std::span<std::byte> stored) {
  if (staged.encoding != StagedEncoding::kBf16) {
    return RotatePage(owner.profile, {owner.heads.first + head, 1}, FirstToken(staged.page), rows,
                      stored);
  }
  if (stored.data() != rows.data()) {
    std::copy(rows.begin(), rows.end(), stored.begin());
  }
  return absl::OkStatus();
}

absl::Status DemoteHead(const PageOwner& owner,
                        const StagedPage& staged,
                        uint32_t head,
                        std::span<const std::byte> stored,
                        std::span<std::byte> codes,
                        uint32_t& crc32c) {
  if (const absl::Status status = DemotePage(owner.profile, {owner.heads.first + head, 1},
                                             FirstToken(staged.page), stored, codes);
      !status.ok()) {
    return absl::Status(status.code(), absl::StrCat(Name(staged), ": ", status.message()));
  }
  crc32c = Crc32c(codes);
  return absl::OkStatus();
}

}  // namespace crumb
