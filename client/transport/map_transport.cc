// SPDX-License-Identifier: Apache-2.0
#include "client/transport/map_transport.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "client/transport/gpu_source.h"
#include "proto/base/check.h"
#include "proto/base/huge_page.h"
#include "proto/base/status_macros.h"

namespace crumb {
namespace {

// Small publishes do not make the daemon map anew each time they grow a little.
constexpr size_t kMinStagingBytes = size_t{1} << 20;
constexpr absl::Duration kMapAheadTime = absl::Seconds(1);

}  // namespace

MapTransport::MapTransport(const Options& options, const SessionInfo& session, const Clock& clock)
    : options_(options),
      source_options_{
          .profile = session.profile, .heads = session.heads, .verify = options.verify_pages},
      clock_(clock),
      socket_(session, clock),
      chunks_(session.profile->geometry(), &socket_, clock),
      gpu_chunks_(session.profile->geometry(), session.gpu, &socket_, clock),
      registrar_(options.gpu < 0 ? nullptr : std::make_unique<ChunkRegistrar>(options.gpu, clock)) {
}

absl::StatusOr<std::unique_ptr<MapTransport>> MapTransport::Connect(const Options& options,
                                                                    const SessionInfo& session,
                                                                    absl::Time deadline,
                                                                    const Clock& clock) {
  std::unique_ptr<MapTransport> transport(new MapTransport(options, session, clock));
  CRUMB_RETURN_IF_ERROR(transport->socket_.Connect(deadline));
  return transport;
}

absl::StatusOr<std::unique_ptr<PageSource>> MapTransport::Open(const LeasedPrefix& prefix,
                                                               absl::Time deadline) {
  return MappedSource::Open(source_options_, prefix, &chunks_, deadline);
}

absl::StatusOr<std::unique_ptr<PageSource>> MapTransport::OpenOnGpu(const LeasedPrefix& prefix,
                                                                    absl::Time deadline) {
  if (gpu_chunks_.device() < 0) {
    return Open(prefix, deadline);
  }
  CRUMB_ASSIGN_OR_RETURN(std::unique_ptr<PageSource> rest,
                         Open(GpuSource::RestOf(prefix), deadline));
  return GpuSource::Open({.profile = source_options_.profile, .heads = source_options_.heads},
                         prefix, std::move(rest), &gpu_chunks_, deadline);
}

absl::Status MapTransport::SendPages(PublishId,
                                     uint64_t,
                                     std::span<const OutgoingPage>,
                                     absl::Time) {
  return absl::UnimplementedError("the memory map stages pages, it does not send them");
}

absl::StatusOr<std::span<std::byte>> MapTransport::AcquireStaging(size_t bytes,
                                                                  absl::Time deadline) {
  if (bytes > kMaxStagingBytes) {
    return absl::InvalidArgumentError(absl::StrCat("staging memory of ", bytes, " bytes; at most ",
                                                   kMaxStagingBytes, ": publish in parts"));
  }
  {
    absl::MutexLock lock(&mutex_);
    const auto is_free = [this] {
      mutex_.AssertReaderHeld();
      return !staging_held_;
    };
    if (!mutex_.AwaitWithTimeout(absl::Condition(&is_free), deadline - clock_.Now())) {
      return absl::DeadlineExceededError(
          "another publish of this client still uses its staging memory; publish one prefix at a "
          "time, or give this one more time");
    }
    staging_held_ = true;
  }
  if (staging_.bytes().size() < bytes) {
    if (absl::Status status = ReplaceStaging(bytes, deadline); !status.ok()) {
      ReleaseStaging(/*discard=*/true);
      return status;
    }
  }
  return staging_.bytes();
}

void MapTransport::TouchStaging(std::span<std::byte> part) {
  const size_t end = static_cast<size_t>(part.data() - staging_.bytes().data()) + part.size();
  if (end > staging_.touched_bytes()) {
    staging_.Touch(end);
  }
}

absl::Status MapTransport::RegisterStaging() {
  if (staging_registration_ == nullptr) {
    TouchStaging(staging_.bytes());
    CRUMB_ASSIGN_OR_RETURN(staging_registration_, HostRegistration::Create(staging_.bytes(),
                                                                           /*is_read_only=*/false));
  }
  return absl::OkStatus();
}

absl::Status MapTransport::ReplaceStaging(size_t bytes, absl::Time deadline) {
  staging_registration_ = nullptr;
  staging_ = StagingBuffer();  // First: not both at the same time.
  if (bytes > kHugePageBytes) {
    bytes = (bytes + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  }
  CRUMB_ASSIGN_OR_RETURN(staging_, StagingBuffer::Create(std::max(bytes, kMinStagingBytes)));
  return socket_.GiveStaging(staging_.memfd(), staging_.bytes().size(), deadline);
}

void MapTransport::ReleaseStaging(bool discard) {
  StagingBuffer discarded;  // Unmapped without the lock.
  absl::MutexLock lock(&mutex_);
  CRUMB_CHECK(staging_held_, "staging memory is released by who holds it");
  if (discard) {
    staging_registration_ = nullptr;
    discarded = std::move(staging_);
  }
  staging_held_ = false;
  staging_last_used_ = clock_.Now();
}

template <typename Map>
auto MapTransport::MapListed(bool of_copies, Map* map, absl::Time deadline) {
  const auto listed = socket_.ListChunks(of_copies, kMaxAhead, deadline);
  absl::flat_hash_set<ChunkId> kept;
  std::vector<std::shared_ptr<typename Map::Chunk>> mapped;  // shared: with the cache.
  absl::Status status = listed.status();  // Of a daemon that is gone, or knows no such request.
  for (const ListedChunk& chunk : listed.ok() ? *listed : std::vector<ListedChunk>()) {
    kept.insert(ChunkId(chunk.id));
    const auto encoding = static_cast<PageEncoding>(chunk.encoding);
    if (status.ok() && (encoding == PageEncoding::kInt2 || encoding == PageEncoding::kBf16)) {
      // What fails here fails again where it matters, and says so there.
      auto chunk_mapped = map->Get(ChunkId(chunk.id), encoding, deadline);
      status = chunk_mapped.status();
      if (status.ok()) {
        mapped.push_back(*std::move(chunk_mapped));
      }
    }
  }
  map->DropIdle(kept);
  return mapped;
}

void MapTransport::MapAhead(absl::Time deadline) {
  if (gpu_chunks_.device() >= 0) {
    MapListed(/*of_copies=*/true, &gpu_chunks_, deadline);
  }
  const auto chunks = MapListed(/*of_copies=*/false, &chunks_, deadline);
  if (registrar_ != nullptr) {
    registrar_->SetChunks(chunks);
  }
}

void MapTransport::Maintain() {
  MapAhead(clock_.Now() + kMapAheadTime);
  {
    absl::MutexLock lock(&mutex_);
    if (staging_held_ || staging_.bytes().size() <= kMinStagingBytes ||
        clock_.Now() - staging_last_used_ < options_.staging_max_idle) {
      return;
    }
    staging_held_ = true;
  }
  // The daemon maps staging until it is given another: so give it the smallest.
  const absl::Status status = ReplaceStaging(kMinStagingBytes, clock_.Now() + absl::Seconds(1));
  ReleaseStaging(/*discard=*/!status.ok());
}

}  // namespace crumb
