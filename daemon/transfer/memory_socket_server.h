// SPDX-License-Identifier: Apache-2.0
//
// The daemon's end of the memory socket (proto/wire/memory_socket.h): hands out chunks of the arena
// and of the GPU's memory, and takes in staging memory. One thread; whoever can open the socket may
// connect, and each request proves its session by the secret.
//
// A connection that sends what is no request, or does not take its replies, is closed; the others
// do not notice. Requests that are refused for their content are answered, and the connection
// stays.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "daemon/store/page_store.h"
#include "daemon/transfer/data_plane.h"
#include "daemon/transfer/session_table.h"
#include "proto/base/unique_fd.h"
#include "proto/wire/memory_socket.h"

namespace crumb {

struct MemorySocketOptions {
  std::string path;
  uint32_t mode = 0660;
  uint32_t max_connections = 1024;  // One more is told RESOURCE_EXHAUSTED and closed.
};

// Thread-safe.
class MemorySocketServer : public DataPlaneServer {
 public:
  // Serves on return. A file at `path` is replaced: the caller knows that no one listens there.
  // UNAVAILABLE, naming the path and the system's reason: it cannot be bound. `store` and
  // `sessions` outlive this.
  static absl::StatusOr<std::unique_ptr<MemorySocketServer>> Create(MemorySocketOptions options,
                                                                    const PageStore& store,
                                                                    SessionTable& sessions);
  ~MemorySocketServer() override { MemorySocketServer::Stop(); }
  MemorySocketServer(const MemorySocketServer&) = delete;
  MemorySocketServer& operator=(const MemorySocketServer&) = delete;

  std::string Description() const override;
  // Closes all connections and removes the socket's file.
  void Stop() override;

 private:
  struct Reply {
    absl::Status status;
    std::array<UniqueFd, 2> fds = {};  // Those that are valid go along.
    uint64_t bytes = 0;
    uint64_t num_blocks = 0;
    std::vector<ListedChunk> listed = {};  // In place of a message.
  };

  MemorySocketServer(MemorySocketOptions options, const PageStore& store, SessionTable& sessions)
      : options_(std::move(options)), store_(store), sessions_(sessions) {}

  absl::Status Listen();
  void RunThread();
  void Accept();
  // Returns whether the connection goes on.
  bool Serve(int connection);
  // Whether the peer has taken it; one that does not read its replies is not waited for.
  static bool Send(int connection, const Reply& answer);
  Reply Answer(const MemoryRequest& request, const UniqueFd& received);
  Reply AnswerChunk(const MemoryRequest& request) const;
  Reply AnswerList(const MemoryRequest& request) const;

  const MemorySocketOptions options_;
  const PageStore& store_;
  SessionTable& sessions_;
  UniqueFd listener_;
  UniqueFd epoll_;
  UniqueFd wake_;   // An eventfd: stop.
  UniqueFd spare_;  // Of nothing; see Accept.
  std::thread thread_;
  absl::flat_hash_map<int, UniqueFd> connections_;  // Confined to the thread.
};

}  // namespace crumb
