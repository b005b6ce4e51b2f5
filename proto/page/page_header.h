// SPDX-License-Identifier: Apache-2.0
//
// The header kept beside each page image: in a chunk's header table (mapped by readers), in front
// of each page that travels, and with each page on disk. A fixed layout of 512 bytes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"

#include "proto/base/ids.h"
#include "proto/page/geometry.h"

namespace crumb {

// Little-endian, no padding, trivially copyable; golden bytes in tests/proto.
struct PageHeader {
  static constexpr uint32_t kMagic = 0x424d5243;  // "CRMB"

  uint32_t magic = kMagic;
  uint16_t format_version = kPageFormatVersion;
  PageEncoding encoding = PageEncoding::kInt2;
  uint8_t reserved = 0;
  // Odd while the block is being written, even when its bytes are settled; each new use of the
  // block ends on a higher even number. In mapped memory it is accessed atomically (see arena
  // docs).
  uint64_t generation = 0;
  uint32_t first_token = 0;    // Position of the page's first token: a multiple of kPageTokens.
  uint32_t valid_tokens = 0;   // 1..kPageTokens; only whole pages are published today.
  uint64_t heads_present = 0;  // Bit h: KV head h of the image is there.
  std::array<uint8_t, Digest::kBytes> profile_id{};
  std::array<uint8_t, Digest::kBytes> namespace_id{};
  std::array<uint32_t, Geometry::kMaxKvHeads> head_crc32c{};  // Of each KV head's range.
  std::array<uint8_t, 160> padding{};

  friend bool operator==(const PageHeader&, const PageHeader&) = default;
};
static_assert(sizeof(PageHeader) == 512);
static_assert(offsetof(PageHeader, generation) == 8);

// What a reader expects of a header before it believes it.
struct PageExpectation {
  const ProfileId& profile_id;
  const NamespaceId& namespace_id;
  PageEncoding encoding = PageEncoding::kInt2;
  Generation generation;
  PageIdx page_idx;
};

// FAILED_PRECONDITION, naming the field, what it holds and what was expected, when the header is of
// another format, profile, namespace, encoding, generation or position.
absl::Status CheckPageHeader(const PageHeader& header, const PageExpectation& expected);

// The checksum of each present head's range of `image`. `image` has geometry.PageBytes(encoding)
// bytes; heads absent from `heads_present` get 0.
std::array<uint32_t, Geometry::kMaxKvHeads> HeadChecksums(const Geometry& geometry,
                                                          PageEncoding encoding,
                                                          uint64_t heads_present,
                                                          std::span<const std::byte> image);

// DATA_LOSS, naming the page, the head and both checksums, when a head of `heads` differs from the
// header's checksum.
absl::Status VerifyPageImage(const Geometry& geometry,
                             const PageHeader& header,
                             uint64_t heads,
                             std::span<const std::byte> image);

}  // namespace crumb
