// SPDX-License-Identifier: Apache-2.0
//
// The messages of the UCX data plane, each the header of one active message: fixed layouts,
// little-endian, every one beginning with a Preamble. Some carry a payload beside the header.
//
//   client -> daemon                                     daemon -> client
//   kHello   proves the session of the connection        kEnd    OK, or why not
//   kPull    wants pages under a lease                   kChunk  payload: a piece of the pull's
//            payload: PullEntry x num_entries                    stream (pull_plan.h)
//                                                        kEnd    only when the pull is refused or
//                                                                broke off; its bytes are to be
//                                                                forgotten
//   kCancel  no longer wants the pull's bytes
//   kStage   payload: a piece of the pages of an open    kEnd    once all bytes are in place,
//            publish                                             or why not
//
// A connection belongs to the session of its kHello; there is one. A client may have several, of
// one group: a pull's chunks come over any of them, whichever it was asked for on. `request_id` is
// the client's number for a request, one of its own within the group, and is repeated in every
// answer to it. Whatever arrives is another process's
// word: Decode checks it against the bounds below before anyone reads a field.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "proto/base/ids.h"
#include "proto/page/geometry.h"
#include "proto/wire/memory_socket.h"

namespace crumb {

inline constexpr uint32_t kPullMagic = 0x50424d43;  // "CMBP"
inline constexpr uint16_t kPullVersion = 3;
// Both encodings of each page of a prompt of 1,048,576 tokens.
inline constexpr uint32_t kMaxPullEntries = 2 * (1u << 20) / kPageTokens;
// Of a stream's gathered piece; a part of an image has at most 1.5 times as many. UCX gets no
// faster beyond it.
inline constexpr uint32_t kMaxChunkBytes = 4u << 20;

enum class PullOp : uint16_t {
  kHello = 1,
  kPull = 2,
  kCancel = 3,
  kStage = 4,
  kChunk = 5,
  kEnd = 6,
};

struct Preamble {
  uint32_t magic = kPullMagic;
  uint16_t version = kPullVersion;
  PullOp op = PullOp::kHello;
  uint64_t request_id = 0;
};

struct HelloMessage {
  Preamble preamble;
  uint64_t session_id = 0;
  std::array<uint8_t, kSessionSecretBytes> session_secret{};
  uint64_t group = 0;  // Of connections of this session; a random number.
};

struct PullMessage {
  Preamble preamble;
  uint64_t lease_id = 0;
  uint32_t num_entries = 0;  // 1..kMaxPullEntries
  uint32_t chunk_bytes = 0;  // 1..kMaxChunkBytes; how the stream is cut: PullPlan::Cut.
  // The shape of the stream: the model's geometry with only the session's KV heads.
  Geometry geometry;
  uint32_t ordered_layers = 0;  // 1..geometry.num_layers; see pull_plan.h.
  uint32_t reserved = 0;        // Ignored.
};

// One encoding of one page that a pull wants.
struct PullEntry {
  uint32_t page_idx = 0;
  PageEncoding encoding = PageEncoding::kInt2;
  std::array<uint8_t, 3> reserved{};
  uint64_t generation = 0;  // As the lookup said: even.
};

struct CancelMessage {
  Preamble preamble;
};

// Bytes [offset, offset + payload) of a publish's staging memory. Pieces of a request come in
// order; one request of a publish after another's answer, and anywhere, over bytes that the daemon
// has written to its arena, too.
struct StageMessage {
  Preamble preamble;
  uint64_t publish_id = 0;
  uint64_t offset = 0;          // Of this piece in staging memory.
  uint64_t request_offset = 0;  // Of this piece in its request: at most `offset`.
  uint64_t request_bytes = 0;   // Of all pieces of the request. Staging ends by kMaxStagingBytes.
};

// Bytes [offset, offset + payload) of the pull's stream.
struct ChunkMessage {
  Preamble preamble;
  uint64_t offset = 0;
  uint64_t total_bytes = 0;  // Of the whole stream.
};

struct EndMessage {
  Preamble preamble;
  uint32_t status_code = 0;  // absl::StatusCode; 0 is OK.
  uint32_t message_bytes = 0;
  std::array<char, 224> message{};  // Of the status, cut at its end.
};

static_assert(sizeof(Preamble) == 16);
static_assert(sizeof(HelloMessage) == 48);
static_assert(sizeof(PullMessage) == 56);
static_assert(sizeof(Geometry) == 16);
static_assert(sizeof(PullEntry) == 16);
static_assert(sizeof(StageMessage) == 48);
static_assert(sizeof(ChunkMessage) == 32);
static_assert(sizeof(EndMessage) == 248);

using DataPlaneMessage =
    std::variant<HelloMessage, PullMessage, CancelMessage, StageMessage, ChunkMessage, EndMessage>;

// The message in `header`. INVALID_ARGUMENT, naming the field, its value and the limit: another
// magic, version or operation, a header of another size than the operation's, a field out of its
// bounds. Reads nothing beyond `header`; alignment does not matter.
absl::StatusOr<DataPlaneMessage> DecodeMessage(std::span<const std::byte> header);

// The entries in a kPull's payload. INVALID_ARGUMENT when their number is not message.num_entries,
// an encoding is unknown, a generation is odd, a page is beyond 2^32 tokens, or they are not in
// strictly ascending order of (page, encoding).
absl::StatusOr<std::vector<PullEntry>> DecodeEntries(const PullMessage& message,
                                                     std::span<const std::byte> payload);

// `status` as an answer, and the status that an answer carries.
EndMessage MakeEnd(uint64_t request_id, const absl::Status& status);
absl::Status EndStatus(const EndMessage& message);

// The bytes of a message or of entries, as they travel. A view of its argument.
template <typename Message>
std::span<const std::byte> WireBytes(const Message& message) {
  return std::as_bytes(std::span(&message, 1));
}

}  // namespace crumb
