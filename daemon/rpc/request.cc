// SPDX-License-Identifier: Apache-2.0
#include "daemon/rpc/request.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

#include "proto/base/status_macros.h"
#include "proto/page/page_format.h"

namespace crumb {
namespace {

static_assert(std::endian::native == std::endian::little, "tokens travel little-endian");

// Text of a client as messages may show it.
std::string Shown(std::string_view text) {
  constexpr size_t kShownBytes = 40;
  const absl::string_view head(text.data(), std::min(text.size(), kShownBytes));
  return absl::StrCat("\"", absl::Utf8SafeCEscape(head),
                      text.size() > kShownBytes ? "\"..." : "\"");
}

absl::Status TooLong(absl::string_view field, size_t bytes, size_t limit) {
  return absl::InvalidArgumentError(
      absl::StrCat(field, " has ", bytes, " bytes, at most ", limit, " are allowed: shorten it"));
}

bool IsTenantCharacter(char c) {
  return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '.' || c == '-';
}

template <typename Id>
absl::StatusOr<Id> ParseDigest(absl::string_view field, std::string_view bytes) {
  if (bytes.size() != Digest::kBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        field, " has ", bytes.size(), " bytes: it is a SHA-256, of ", Digest::kBytes, " bytes"));
  }
  Id id;
  std::memcpy(id.bytes.data(), bytes.data(), Digest::kBytes);
  return id;
}

absl::Status NoTokens() {
  return absl::InvalidArgumentError("tokens is empty: send the ids of the prompt, one at least");
}

absl::Status CheckTokenBytes(size_t bytes) {
  if (bytes % sizeof(uint32_t) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("tokens has ", bytes,
                     " bytes, not a multiple of 4: pack each id as a little-endian uint32"));
  }
  if (const size_t count = bytes / sizeof(uint32_t); count > kMaxTokens) {
    return absl::InvalidArgumentError(absl::StrCat("tokens has ", count, " ids, at most ",
                                                   kMaxTokens,
                                                   " are allowed: send a shorter "
                                                   "prefix"));
  }
  return absl::OkStatus();
}

// One pass without branches finds whether there is a bad id, a second which. In lanes, which is
// what the compiler makes vectors of.
uint32_t AllBits(std::span<const uint32_t> ids) {
  constexpr size_t kLanes = 16;
  std::array<uint32_t, kLanes> lanes{};
  size_t at = 0;
  for (; at + kLanes <= ids.size(); at += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] |= ids[at + lane];
    }
  }
  uint32_t all_bits = 0;
  for (const uint32_t lane : lanes) {
    all_bits |= lane;
  }
  for (; at < ids.size(); ++at) {
    all_bits |= ids[at];
  }
  return all_bits;
}

absl::Status CheckTokenIds(std::span<const uint32_t> ids, uint32_t all_bits) {
  if (all_bits <= kMaxTokenId) {
    return absl::OkStatus();
  }
  const auto bad =
      std::find_if(ids.begin(), ids.end(), [](uint32_t id) { return id > kMaxTokenId; });
  return absl::InvalidArgumentError(
      absl::StrCat("tokens[", bad - ids.begin(), "] is ", *bad, ", beyond any vocabulary (at most ",
                   kMaxTokenId, "): send ids as the model's tokenizer gives them"));
}

absl::StatusOr<StagedEncoding> ParseEncoding(const v1::StagedPage& staged) {
  switch (staged.encoding()) {
    case v1::ENCODING_INT2:
      return StagedEncoding::kInt2;
    case v1::ENCODING_BF16:
      return StagedEncoding::kBf16;
    case v1::ENCODING_BF16_PLAIN:
      return StagedEncoding::kBf16Plain;
    default:
      return absl::InvalidArgumentError(absl::StrCat(
          "staged page ", staged.page_idx(), " has encoding ", static_cast<int>(staged.encoding()),
          ": it must be ENCODING_INT2 (1), ENCODING_BF16 (2) or ENCODING_BF16_PLAIN (3)"));
  }
}

}  // namespace

absl::StatusOr<TokenList> TokenList::ParseOrEmpty(const std::string& packed) {
  CRUMB_RETURN_IF_ERROR(CheckTokenBytes(packed.size()));
  const size_t count = packed.size() / sizeof(uint32_t);
  TokenList list;
  if (reinterpret_cast<uintptr_t>(packed.data()) % alignof(uint32_t) == 0) {
    list.ids_ = std::span(reinterpret_cast<const uint32_t*>(packed.data()), count);
  } else {
    list.storage_ = std::make_unique_for_overwrite<uint32_t[]>(count);
    std::memcpy(list.storage_.get(), packed.data(), packed.size());
    list.ids_ = std::span(list.storage_.get(), count);
  }
  CRUMB_RETURN_IF_ERROR(CheckTokenIds(list.ids_, AllBits(list.ids_)));
  return list;
}

absl::StatusOr<TokenList> TokenList::Parse(const std::string& packed) {
  if (packed.empty()) {
    return NoTokens();
  }
  return ParseOrEmpty(packed);
}

absl::StatusOr<TokenList> TokenList::Read(size_t bytes,
                                          google::protobuf::io::CodedInputStream& input) {
  if (const absl::Status status = bytes == 0 ? NoTokens() : CheckTokenBytes(bytes); !status.ok()) {
    static_cast<void>(input.Skip(static_cast<int>(std::min<size_t>(bytes, INT32_MAX))));
    return status;
  }
  constexpr size_t kStep = size_t{8} << 10;  // What was copied is checked while it is at hand.
  const size_t count = bytes / sizeof(uint32_t);
  TokenList list;
  list.storage_ = std::make_unique_for_overwrite<uint32_t[]>(count);
  list.ids_ = std::span(list.storage_.get(), count);
  auto* const target = reinterpret_cast<std::byte*>(list.storage_.get());
  uint32_t all_bits = 0;
  size_t num_checked = 0;
  for (size_t copied = 0; copied < bytes;) {
    const void* piece = nullptr;
    int piece_bytes = 0;
    if (!input.GetDirectBufferPointer(&piece, &piece_bytes)) {
      return absl::InvalidArgumentError(absl::StrCat("tokens has ", bytes, " bytes, but only ",
                                                     copied, " came: send the whole message"));
    }
    const size_t step = std::min({kStep, static_cast<size_t>(piece_bytes), bytes - copied});
    std::memcpy(target + copied, piece, step);
    static_cast<void>(input.Skip(static_cast<int>(step)));
    copied += step;
    const size_t num_whole = copied / sizeof(uint32_t);
    all_bits |= AllBits(list.ids_.subspan(num_checked, num_whole - num_checked));
    num_checked = num_whole;
  }
  CRUMB_RETURN_IF_ERROR(CheckTokenIds(list.ids_, all_bits));
  return list;
}

absl::StatusOr<AttachSpec> ParseAttach(const v1::AttachRequest& request) {
  AttachSpec spec;
  spec.client_name = request.client_name();
  spec.pid = request.pid();
  spec.tenant = request.tenant().empty() ? "default" : request.tenant();
  if (spec.client_name.empty()) {
    return absl::InvalidArgumentError(
        "client_name is empty: name the engine, it is shown to operators");
  }
  if (spec.client_name.size() > kMaxNameBytes) {
    return TooLong("client_name", spec.client_name.size(), kMaxNameBytes);
  }
  if (spec.tenant.size() > kMaxNameBytes) {
    return TooLong("tenant", spec.tenant.size(), kMaxNameBytes);
  }
  if (!std::all_of(spec.tenant.begin(), spec.tenant.end(), IsTenantCharacter)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "tenant ", Shown(spec.tenant), " may have only the characters A-Z a-z 0-9 _ . -"));
  }
  if (request.library_version().size() > kMaxNameBytes) {
    return TooLong("library_version", request.library_version().size(), kMaxNameBytes);
  }
  if (request.profile_file().size() > kMaxProfileFileBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "profile_file has ", request.profile_file().size(), " bytes, at most ",
        kMaxProfileFileBytes,
        " are allowed: fit a profile of fewer matrices (crumb-calibrate fit --rotation "
        "per-layer, or --codec oscar-int2-aware)"));
  }
  CRUMB_ASSIGN_OR_RETURN(spec.profile_id,
                         ParseDigest<ProfileId>("profile_id", request.profile_id()));
  if (request.has_heads()) {
    spec.heads = {request.heads().first(), request.heads().count()};
    if (spec.heads.count == 0) {
      return absl::InvalidArgumentError(
          "heads.count is 0: leave heads unset for all KV heads, or give the rank's");
    }
  }
  if (!request.gpu_uuid().empty()) {
    spec.gpu.emplace();
    if (request.gpu_uuid().size() != spec.gpu->size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("gpu_uuid has ", request.gpu_uuid().size(), " bytes: it has ",
                       spec.gpu->size(), ", or none for an engine that reads no pages on a GPU"));
    }
    std::copy(request.gpu_uuid().begin(), request.gpu_uuid().end(), spec.gpu->begin());
  }
  return spec;
}

absl::Status CheckContextKey(std::string_view context_key) {
  if (context_key.size() > kMaxContextKeyBytes) {
    return TooLong("context_key", context_key.size(), kMaxContextKeyBytes);
  }
  return absl::OkStatus();
}

absl::StatusOr<NamespaceId> ParseNamespaceId(std::string_view bytes) {
  return ParseDigest<NamespaceId>("namespace_id", bytes);
}

absl::StatusOr<std::vector<LeaseId>> ParseLeases(
    const google::protobuf::RepeatedField<uint64_t>& lease_ids) {
  const auto count = static_cast<size_t>(lease_ids.size());
  if (count > kMaxLeasesPerRequest) {
    return absl::InvalidArgumentError(absl::StrCat("lease_ids has ", count, " ids, at most ",
                                                   kMaxLeasesPerRequest,
                                                   " are allowed: send several requests"));
  }
  std::vector<LeaseId> leases;
  leases.reserve(count);
  for (const uint64_t id : lease_ids) {
    leases.emplace_back(id);
  }
  return leases;
}

absl::StatusOr<std::vector<StagedPage>> ParseStaged(
    const google::protobuf::RepeatedPtrField<v1::StagedPage>& staged) {
  // INT2 and BF16 of each page.
  constexpr size_t kMaxStaged = 2 * kMaxTokens / kPageTokens;
  const auto count = static_cast<size_t>(staged.size());
  if (count > kMaxStaged) {
    return absl::InvalidArgumentError(absl::StrCat("staged has ", count, " pages, at most ",
                                                   kMaxStaged,
                                                   " are allowed: publish a shorter "
                                                   "prefix first"));
  }
  std::vector<StagedPage> pages;
  pages.reserve(count);
  for (const v1::StagedPage& page : staged) {
    CRUMB_ASSIGN_OR_RETURN(const StagedEncoding encoding, ParseEncoding(page));
    pages.push_back({PageIdx(page.page_idx()),
                     encoding,
                     page.staging_offset(),
                     {page.head_crc32c().begin(), page.head_crc32c().end()}});
  }
  return pages;
}

}  // namespace crumb
