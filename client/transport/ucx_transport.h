// SPDX-License-Identifier: Apache-2.0
//
// The UCX data plane of a session at the engine's end: see page_source.h for what it does, and
// proto/wire/pull_message.h for what it says to the daemon.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "client/transport/page_source.h"
#include "client/transport/ucx_worker.h"
#include "proto/base/clock.h"

namespace crumb {

struct UcxTransportOptions {
  UcxOptions ucx;
  // Connections of the session, each with a thread that receives and verifies what comes over it:
  // one thread copies slower than memory can. At least 1.
  uint32_t num_links = 2;
  // Bytes of a message, about; see PullPlan. Measured on loopback:
  // docs/decisions/0060-pull-stream.md.
  uint32_t chunk_bytes = 1u << 20;
  // Layers of a pull that come in order, ahead of the page images: 1 up to all. 0: as many as suit
  // the geometry (UcxPull::DefaultOrderedLayers).
  uint32_t ordered_layers = 0;
  // Messages of a publish under way; each has a chunk of memory of its own.
  uint32_t stage_window = 8;
  // Memory of ended pulls that is kept for the next ones.
  size_t max_kept_bytes = size_t{512} << 20;
};

// ConnectUcx with other options than the defaults.
absl::StatusOr<std::unique_ptr<PageTransport>> ConnectUcxWithOptions(
    const UcxTransportOptions& options,
    const SessionInfo& session,
    absl::Time deadline,
    const Clock& clock = Clock::System());

}  // namespace crumb
