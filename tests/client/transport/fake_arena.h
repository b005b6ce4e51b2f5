// SPDX-License-Identifier: Apache-2.0
//
// A daemon's arena and memory socket as an engine meets them: real sealed memfds, a real socket and
// one thread that answers, or does not, as a test wishes.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

#include "client/transport/page_source.h"
#include "proto/base/unique_fd.h"
#include "proto/page/chunk_layout.h"
#include "proto/page/page_header.h"
#include "proto/wire/memory_socket.h"

namespace crumb {

// Thread-compatible, but for what the socket's thread does.
class FakeArena {
 public:
  explicit FakeArena(std::shared_ptr<const Profile> profile);
  ~FakeArena();
  FakeArena(const FakeArena&) = delete;
  FakeArena& operator=(const FakeArena&) = delete;

  // A session that may ask for every chunk.
  SessionInfo session() const;
  const NamespaceId& namespace_id() const { return namespace_id_; }

  // A new chunk; its blocks hold random bytes under right headers, block i that of page i, in
  // generation 2. Returns its id.
  ChunkId AddChunk(PageEncoding encoding, uint32_t num_blocks, bool sealed = true);
  // Pages [0, num_blocks of the chunk) as a lookup would place them, in that encoding.
  LeasedPrefix PrefixIn(ChunkId chunk) const;

  // Gives the chunk copies in memory of their own, as in a GPU's, and says they have `bytes` (0: as
  // many as they have). The headers are the chunk's.
  void AddCopies(ChunkId chunk, uint64_t bytes = 0);

  // Of the daemon's own, writable mapping.
  PageHeader& header(ChunkId chunk, uint32_t block);
  std::span<std::byte> image(ChunkId chunk, uint32_t block);

  // What the socket does from now on.
  enum class Mood { kAnswer, kSilent, kHangUp, kOtherVersion };
  void SetMood(Mood mood);
  void SetStatus(absl::Status status);  // The answer to each request.
  // What it says when it is asked for its chunks; nothing at first. By id, the newest first.
  void SetListed(std::vector<ListedChunk> listed);
  // Ends the connections that are open; new ones are welcome.
  void CloseConnections();

  int num_requests() const;
  // Of the staging memory given last.
  UniqueFd TakeStaging();
  uint64_t staging_bytes() const;

 private:
  struct Chunk {
    PageEncoding encoding = PageEncoding::kInt2;
    ChunkLayout layout;
    UniqueFd memfd;
    std::byte* base = nullptr;
    UniqueFd copies;
    uint64_t copies_bytes = 0;
  };

  void Serve();
  bool Answer(int connection);

  const std::shared_ptr<const Profile> profile_;
  NamespaceId namespace_id_;
  std::string path_;
  UniqueFd listener_;
  UniqueFd wake_;

  mutable absl::Mutex mutex_;
  std::map<uint32_t, Chunk> chunks_ ABSL_GUARDED_BY(mutex_);
  Mood mood_ ABSL_GUARDED_BY(mutex_) = Mood::kAnswer;
  std::vector<ListedChunk> listed_ ABSL_GUARDED_BY(mutex_);
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool close_all_ ABSL_GUARDED_BY(mutex_) = false;
  int num_requests_ ABSL_GUARDED_BY(mutex_) = 0;
  UniqueFd staging_ ABSL_GUARDED_BY(mutex_);
  uint64_t staging_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::thread thread_;
};

}  // namespace crumb
