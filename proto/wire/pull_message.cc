// SPDX-License-Identifier: Apache-2.0
#include "proto/wire/pull_message.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>
#include <tuple>

#include "absl/strings/str_cat.h"

#include "proto/base/status_macros.h"

namespace crumb {
namespace {

static_assert(std::endian::native == std::endian::little, "messages travel as they lie in memory");

// A field of `op` that is out of its bounds.
template <typename Value>
absl::Status OutOfBounds(absl::string_view field, const Value& value, absl::string_view bounds) {
  return absl::InvalidArgumentError(
      absl::StrCat("data plane message: ", field, " is ", value, ", must be ", bounds));
}

absl::Status CheckFields(const HelloMessage& message) {
  if (message.session_id == 0) {
    return OutOfBounds("session id", 0, "one that an attach gave");
  }
  return absl::OkStatus();
}

absl::Status CheckFields(const PullMessage& message) {
  if (message.num_entries < 1 || message.num_entries > kMaxPullEntries) {
    return OutOfBounds("number of entries", message.num_entries,
                       absl::StrCat("1..", kMaxPullEntries));
  }
  if (const Geometry& geometry = message.geometry; !geometry.IsValid()) {
    return OutOfBounds(
        "geometry",
        absl::StrCat(geometry.num_layers, " layers of ", geometry.num_kv_heads, " KV heads of ",
                     geometry.key_dim, "+", geometry.value_dim),
        absl::StrCat("1..", Geometry::kMaxLayers, " layers of 1..", Geometry::kMaxKvHeads,
                     " heads of multiples of 32, 32..", kMaxHeadDim));
  }
  if (message.chunk_bytes < 1 || message.chunk_bytes > kMaxChunkBytes) {
    return OutOfBounds("chunk size", message.chunk_bytes, absl::StrCat("1..", kMaxChunkBytes));
  }
  if (message.ordered_layers < 1 || message.ordered_layers > message.geometry.num_layers) {
    return OutOfBounds("number of ordered layers", message.ordered_layers,
                       absl::StrCat("1..", message.geometry.num_layers, ", as the geometry has"));
  }
  return absl::OkStatus();
}

absl::Status CheckFields(const CancelMessage&) {
  return absl::OkStatus();
}

absl::Status CheckFields(const StageMessage& message) {
  if (message.request_bytes < 1 || message.request_bytes > kMaxStagingBytes) {
    return OutOfBounds("bytes of a publish", message.request_bytes,
                       absl::StrCat("1..", kMaxStagingBytes, "; publish a longer prefix in parts"));
  }
  if (message.request_offset >= message.request_bytes || message.request_offset > message.offset) {
    return OutOfBounds("offset in a publish request", message.request_offset,
                       absl::StrCat("below ", message.request_bytes, ", at most ", message.offset));
  }
  if (message.offset - message.request_offset > kMaxStagingBytes - message.request_bytes) {
    return OutOfBounds(
        "offset of staged bytes", message.offset,
        absl::StrCat("within ", kMaxStagingBytes, " bytes; publish a longer prefix in parts"));
  }
  return absl::OkStatus();
}

absl::Status CheckFields(const ChunkMessage& message) {
  if (message.offset >= message.total_bytes) {
    return OutOfBounds("offset of a chunk", message.offset,
                       absl::StrCat("below ", message.total_bytes));
  }
  return absl::OkStatus();
}

absl::Status CheckFields(const EndMessage& message) {
  if (message.message_bytes > message.message.size()) {
    return OutOfBounds("length of a status message", message.message_bytes,
                       absl::StrCat("at most ", message.message.size()));
  }
  return absl::OkStatus();
}

template <typename Message>
absl::StatusOr<DataPlaneMessage> DecodeAs(std::span<const std::byte> header) {
  if (header.size() != sizeof(Message)) {
    return OutOfBounds("size of its header", header.size(), absl::StrCat(sizeof(Message)));
  }
  Message message;
  std::memcpy(&message, header.data(), sizeof(message));
  CRUMB_RETURN_IF_ERROR(CheckFields(message));
  return message;
}

}  // namespace

absl::StatusOr<DataPlaneMessage> DecodeMessage(std::span<const std::byte> header) {
  Preamble preamble;
  if (header.size() < sizeof(preamble)) {
    return OutOfBounds("size of its header", header.size(),
                       absl::StrCat("at least ", sizeof(preamble)));
  }
  std::memcpy(&preamble, header.data(), sizeof(preamble));
  if (preamble.magic != kPullMagic) {
    return OutOfBounds("magic", preamble.magic, absl::StrCat(kPullMagic));
  }
  if (preamble.version != kPullVersion) {
    return OutOfBounds("version", preamble.version,
                       absl::StrCat(kPullVersion, "; run one version of Crumb on both ends"));
  }
  switch (preamble.op) {
    case PullOp::kHello:
      return DecodeAs<HelloMessage>(header);
    case PullOp::kPull:
      return DecodeAs<PullMessage>(header);
    case PullOp::kCancel:
      return DecodeAs<CancelMessage>(header);
    case PullOp::kStage:
      return DecodeAs<StageMessage>(header);
    case PullOp::kChunk:
      return DecodeAs<ChunkMessage>(header);
    case PullOp::kEnd:
      return DecodeAs<EndMessage>(header);
  }
  return OutOfBounds("operation", static_cast<uint32_t>(preamble.op), "1..6");
}

absl::StatusOr<std::vector<PullEntry>> DecodeEntries(const PullMessage& message,
                                                     std::span<const std::byte> payload) {
  if (payload.size() != size_t{message.num_entries} * sizeof(PullEntry)) {
    return OutOfBounds("size of the entries", payload.size(),
                       absl::StrCat(message.num_entries, " times ", sizeof(PullEntry)));
  }
  std::vector<PullEntry> entries(message.num_entries);
  std::memcpy(entries.data(), payload.data(), payload.size());
  for (size_t idx = 0; idx < entries.size(); ++idx) {
    const PullEntry& entry = entries[idx];
    if (entry.encoding != PageEncoding::kInt2 && entry.encoding != PageEncoding::kBf16) {
      return OutOfBounds("encoding", static_cast<uint32_t>(entry.encoding), "1 or 2");
    }
    if (entry.page_idx > UINT32_MAX / kPageTokens) {
      return OutOfBounds("page", entry.page_idx, absl::StrCat("0..", UINT32_MAX / kPageTokens));
    }
    if (entry.generation % 2 != 0) {
      return OutOfBounds("generation", entry.generation, "even, as a lookup gave it");
    }
    if (idx > 0 && std::tie(entries[idx - 1].page_idx, entries[idx - 1].encoding) >=
                       std::tie(entry.page_idx, entry.encoding)) {
      return OutOfBounds("order of the entries", absl::StrCat("broken at entry ", idx),
                         "strictly ascending by page and encoding");
    }
  }
  return entries;
}

EndMessage MakeEnd(uint64_t request_id, const absl::Status& status) {
  EndMessage end;
  end.preamble = {.op = PullOp::kEnd, .request_id = request_id};
  end.status_code = static_cast<uint32_t>(status.code());
  const absl::string_view text = status.message();
  end.message_bytes = static_cast<uint32_t>(std::min(text.size(), end.message.size()));
  std::copy_n(text.begin(), end.message_bytes, end.message.begin());
  return end;
}

absl::Status EndStatus(const EndMessage& message) {
  // An unknown code reads as UNKNOWN, as absl defines it.
  return {static_cast<absl::StatusCode>(message.status_code),
          absl::string_view(message.message.data(), message.message_bytes)};
}

}  // namespace crumb
