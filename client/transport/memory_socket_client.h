// SPDX-License-Identifier: Apache-2.0
//
// The engine's end of the memory socket (proto/wire/memory_socket.h): asks for chunks of the
// daemon's arena and gives it staging memory. Connects when first needed, and anew when the daemon
// closed the connection.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

#include "client/transport/page_source.h"
#include "proto/base/clock.h"
#include "proto/base/unique_fd.h"
#include "proto/wire/memory_socket.h"

namespace crumb {

// Thread-safe: one request at a time, others wait for it, but not beyond their deadlines.
class MemorySocketClient {
 public:
  struct Chunk {
    UniqueFd memfd;
    UniqueFd gpu_memory;  // Of a chunk of copies, whose memfd has the headers alone.
    uint64_t bytes = 0;   // Of the memfd, or of the GPU's memory.
    uint64_t num_blocks = 0;
  };

  MemorySocketClient(const SessionInfo& session, const Clock& clock);

  // All: the daemon's own status as it said it; UNAVAILABLE, naming the path, when it does not
  // listen or closed the connection; DEADLINE_EXCEEDED when it does not answer in time.

  // Whether someone listens.
  absl::Status Connect(absl::Time deadline);
  absl::StatusOr<Chunk> GetChunk(ChunkId chunk, absl::Time deadline);
  absl::StatusOr<Chunk> GetCopyChunk(ChunkId chunk, absl::Time deadline);
  // Those that GetChunk, or GetCopyChunk, would give: the newest first, at most `max` and some.
  absl::StatusOr<std::vector<ListedChunk>> ListChunks(bool of_copies,
                                                      size_t max,
                                                      absl::Time deadline);
  // The daemon maps `memfd` itself; the caller may close it.
  absl::Status GiveStaging(int memfd, uint64_t bytes, absl::Time deadline);

 private:
  struct Answer {
    MemoryReply reply;
    std::array<UniqueFd, 2> received;
  };
  absl::StatusOr<Answer> Exchange(const MemoryRequest& request, int memfd, absl::Time deadline);
  absl::Status TakeTurn(absl::Time deadline);
  void EndTurn();
  // By the holder of the turn.
  absl::StatusOr<Answer> ExchangeOnce(const MemoryRequest& request, int memfd, absl::Time deadline);
  absl::Status OpenSocket();
  absl::Status WaitForSocket(short events, absl::Time deadline);  // NOLINT: poll's type.
  MemoryRequest Request(MemoryOp op, uint64_t argument) const;

  const std::string path_;
  const SessionId session_;
  const std::array<uint8_t, kSessionSecretBytes> secret_;
  const Clock& clock_;
  absl::Mutex mutex_;
  bool taken_ ABSL_GUARDED_BY(mutex_) = false;
  UniqueFd socket_;  // The holder of the turn's.
};

}  // namespace crumb
