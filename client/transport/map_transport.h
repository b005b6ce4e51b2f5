// SPDX-License-Identifier: Apache-2.0
//
// The memory map as a session's data plane: pages are read in place in the daemon's sealed memfds,
// and published through a staging memfd of this process.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

#include "client/transport/chunk_registrar.h"
#include "client/transport/gpu_chunk.h"
#include "client/transport/mapped_chunk.h"
#include "client/transport/mapped_source.h"
#include "client/transport/memory_socket_client.h"
#include "client/transport/page_source.h"
#include "client/transport/staging_buffer.h"
#include "proto/base/clock.h"

namespace crumb {

// Thread-safe.
class MapTransport : public PageTransport {
 public:
  struct Options {
    bool verify_pages = true;  // As ClientOptions::verify_mapped_pages.
    int gpu = -1;  // As ClientOptions::gpu: chunks of host memory are registered with it.
    // Staging that has been idle for so long is exchanged for a small one.
    absl::Duration staging_max_idle = absl::Seconds(30);
  };

  // As Open, with pages that have copies in the memory of the session's GPU read there. One that
  // was dropped since the lookup, or cannot be mapped, is an error like any other of Open.
  absl::StatusOr<std::unique_ptr<PageSource>> OpenOnGpu(const LeasedPrefix& prefix,
                                                        absl::Time deadline);

  // UNAVAILABLE, with the reason, when the daemon offers no map or its socket cannot be reached.
  static absl::StatusOr<std::unique_ptr<MapTransport>> Connect(
      const Options& options,
      const SessionInfo& session,
      absl::Time deadline,
      const Clock& clock = Clock::System());

  absl::StatusOr<std::unique_ptr<PageSource>> Open(const LeasedPrefix& prefix,
                                                   absl::Time deadline) override;
  absl::Status SendPages(PublishId publish,
                         uint64_t offset,
                         std::span<const OutgoingPage> pages,
                         absl::Time deadline) override;
  // Maps chunks ahead, too.
  void Maintain() override;

  // Maps the chunks that the daemon has for this session, of its GPU's memory first, so that the
  // first lookup finds them mapped: 0.1 ms each. The newest kMaxAhead of either kind, and as many
  // as the deadline lets; what is left is mapped when a lookup needs it. Unmaps idle ones that the
  // daemon has no more. Those of host memory are then registered with the GPU, in the background.
  static constexpr size_t kMaxAhead = 256;
  void MapAhead(absl::Time deadline);

  // The session's one staging memory, held by one publish at a time.
  //
  // Waits until no other publish holds it, makes it at least `bytes` large, and the daemon knows
  // it. Valid until ReleaseStaging. DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, or errors of the socket;
  // it is then not held.
  absl::StatusOr<std::span<std::byte>> AcquireStaging(size_t bytes, absl::Time deadline);
  // By its holder, before a part of it is written: has the system give it in huge pages where Linux
  // can. Touching all of it at once would cost memory that is perhaps not needed.
  void TouchStaging(std::span<std::byte> part);
  // Has the current GPU write to it by itself. By its holder; until it is replaced.
  absl::Status RegisterStaging();
  // `discard`: the daemon may still be reading it, so it must not be written again.
  void ReleaseStaging(bool discard);

  size_t num_mapped_chunks() const { return chunks_.num_mapped(); }
  size_t num_mapped_gpu_chunks() const { return gpu_chunks_.num_mapped(); }

 private:
  MapTransport(const Options& options, const SessionInfo& session, const Clock& clock);
  absl::Status ReplaceStaging(size_t bytes, absl::Time deadline);
  // Those that are mapped, the newest first.
  template <typename Map>  // ChunkMap, GpuChunkMap.
  auto MapListed(bool of_copies, Map* map, absl::Time deadline);

  const Options options_;
  const MappedSource::Options source_options_;
  const Clock& clock_;
  MemorySocketClient socket_;
  ChunkMap chunks_;
  GpuChunkMap gpu_chunks_;
  std::unique_ptr<ChunkRegistrar> registrar_;  // Null: without a GPU.

  absl::Mutex mutex_;
  bool staging_held_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Time staging_last_used_ ABSL_GUARDED_BY(mutex_);
  // The holder's; guarded by mutex_ while there is none.
  StagingBuffer staging_;
  std::unique_ptr<HostRegistration> staging_registration_;  // Goes before what it is of.
};

}  // namespace crumb
