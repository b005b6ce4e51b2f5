// SPDX-License-Identifier: Apache-2.0
//
// The messages on the daemon's memory socket: a Unix socket of type SOCK_SEQPACKET that passes
// memfds (gRPC cannot). One request, one reply, each one packet of a fixed layout, little-endian.
// A connection may carry any number of requests; each proves its session anew.
//
//   kGetChunk       -> the chunk's memfd (SCM_RIGHTS), sealed against writing and resizing
//   kGiveStaging    <- the session's staging memfd (SCM_RIGHTS with the request): where it puts the
//                      bytes of pages it publishes. Must be sealed against shrinking and growing; a
//                      later one replaces it.
//   kGetCopyChunk   -> two descriptors of a chunk of copies in a GPU's memory: a memfd with its
//                      table of headers, sealed as above, and the memory that holds its blocks,
//                      back to back (crumb/cuda/shared_memory.h)
//   kListChunks, kListCopyChunks
//                   -> the chunks that the session may map with the two above, so that it can do so
//                      before it needs them: the newest first, kMaxListedChunks a reply
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace crumb {

inline constexpr uint32_t kMemorySocketMagic = 0x53424d43;  // "CMBS"
inline constexpr uint16_t kMemorySocketVersion = 1;
inline constexpr size_t kSessionSecretBytes = 16;
// A publish is staged in batches of at most this many bytes of memory.
inline constexpr uint64_t kMaxStagingBytes = uint64_t{1} << 30;

enum class MemoryOp : uint16_t {
  kGetChunk = 1,
  kGiveStaging = 2,
  kGetCopyChunk = 3,
  kListChunks = 4,
  kListCopyChunks = 5,
};

struct MemoryRequest {
  uint32_t magic = kMemorySocketMagic;
  uint16_t version = kMemorySocketVersion;
  MemoryOp op = MemoryOp::kGetChunk;
  uint64_t session_id = 0;
  std::array<uint8_t, kSessionSecretBytes> session_secret{};
  // kGetChunk, kGetCopyChunk: the id. kGiveStaging: bytes of the memfd. kListChunks,
  // kListCopyChunks: ids below this one; 0: all.
  uint64_t argument = 0;
};
static_assert(sizeof(MemoryRequest) == 40);

struct MemoryReply {
  uint32_t magic = kMemorySocketMagic;
  uint16_t version = kMemorySocketVersion;
  uint16_t status_code = 0;         // absl::StatusCode; 0 is OK.
  uint64_t bytes = 0;               // kGetChunk: of the memfd. kGetCopyChunk: of the memory.
  uint64_t num_blocks = 0;          // kGetChunk, kGetCopyChunk: blocks of the chunk.
                                    // kListChunks, kListCopyChunks: chunks in this reply.
  std::array<char, 232> message{};  // Of the status; NUL-terminated. Of a list: ListedChunks.
};
static_assert(sizeof(MemoryReply) == 256);

struct ListedChunk {
  uint32_t id = 0;
  uint32_t encoding = 0;  // PageEncoding's number.
};
static_assert(sizeof(ListedChunk) == 8);
inline constexpr size_t kMaxListedChunks = sizeof(MemoryReply::message) / sizeof(ListedChunk);

// Of the reply to a list, whatever number it claims to have.
inline std::vector<ListedChunk> ListedChunksOf(const MemoryReply& reply) {
  std::vector<ListedChunk> chunks(std::min<uint64_t>(reply.num_blocks, kMaxListedChunks));
  for (size_t i = 0; i < chunks.size(); ++i) {
    std::memcpy(&chunks[i], reply.message.data() + i * sizeof(ListedChunk), sizeof(ListedChunk));
  }
  return chunks;
}

}  // namespace crumb
