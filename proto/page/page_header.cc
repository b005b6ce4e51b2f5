// SPDX-License-Identifier: Apache-2.0
#include "proto/page/page_header.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "proto/base/check.h"
#include "proto/base/crc32c.h"

namespace crumb {
namespace {

template <typename Found, typename Expected>
absl::Status Mismatch(absl::string_view field, const Found& found, const Expected& expected) {
  return absl::FailedPreconditionError(absl::StrCat("page header: ", field, " is ", found,
                                                    ", expected ", expected,
                                                    "; look the prefix up again"));
}

std::string Name(const std::array<uint8_t, Digest::kBytes>& bytes) {
  return Digest{bytes}.Short();
}

}  // namespace

absl::Status CheckPageHeader(const PageHeader& header, const PageExpectation& expected) {
  if (header.magic != PageHeader::kMagic) {
    return Mismatch("magic", absl::Hex(header.magic), absl::Hex(PageHeader::kMagic));
  }
  if (header.format_version != kPageFormatVersion) {
    return Mismatch("format version", header.format_version, kPageFormatVersion);
  }
  if (header.profile_id != expected.profile_id.bytes) {
    return Mismatch("profile", Name(header.profile_id), expected.profile_id.Short());
  }
  if (header.namespace_id != expected.namespace_id.bytes) {
    return Mismatch("namespace", Name(header.namespace_id), expected.namespace_id.Short());
  }
  if (header.encoding != expected.encoding) {
    return Mismatch("encoding", static_cast<int>(header.encoding),
                    static_cast<int>(expected.encoding));
  }
  if (header.generation != expected.generation.value()) {
    return Mismatch("generation", header.generation, expected.generation.value());
  }
  if (header.first_token != expected.page_idx.value() * kPageTokens) {
    return Mismatch("first token", header.first_token, expected.page_idx.value() * kPageTokens);
  }
  return absl::OkStatus();
}

std::array<uint32_t, Geometry::kMaxKvHeads> HeadChecksums(const Geometry& geometry,
                                                          PageEncoding encoding,
                                                          uint64_t heads_present,
                                                          std::span<const std::byte> image) {
  CRUMB_CHECK(image.size() == geometry.PageBytes(encoding), "image of another geometry");
  const size_t range_bytes = geometry.HeadRangeBytes(encoding);
  std::array<uint32_t, Geometry::kMaxKvHeads> checksums{};
  for (uint32_t head = 0; head < geometry.num_kv_heads; ++head) {
    if (((heads_present >> head) & 1) != 0) {
      checksums[head] = Crc32c(image.subspan(head * range_bytes, range_bytes));
    }
  }
  return checksums;
}

absl::Status VerifyPageImage(const Geometry& geometry,
                             const PageHeader& header,
                             uint64_t heads,
                             std::span<const std::byte> image) {
  const auto checksums = HeadChecksums(geometry, header.encoding, heads, image);
  for (uint32_t head = 0; head < geometry.num_kv_heads; ++head) {
    if (((heads >> head) & 1) != 0 && checksums[head] != header.head_crc32c[head]) {
      return absl::DataLossError(absl::StrFormat(
          "page at token %u, KV head %u: checksum of the bytes is %08x, the header says %08x; the "
          "page was dropped or overwritten, look the prefix up again",
          header.first_token, head, checksums[head], header.head_crc32c[head]));
    }
  }
  return absl::OkStatus();
}

}  // namespace crumb
