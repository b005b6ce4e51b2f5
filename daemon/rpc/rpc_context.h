// SPDX-License-Identifier: Apache-2.0
//
// What the services stand on, and what they say of the daemon. Made by the server, constant while
// the services live; everything referred to outlives them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/time/time.h"

#include "daemon/demote/demote_pool.h"
#include "daemon/demote/device_demoter.h"
#include "daemon/metrics/metrics.h"
#include "daemon/rpc/profile_registry.h"
#include "daemon/rpc/session_registry.h"
#include "daemon/store/page_store.h"
#include "daemon/transfer/data_plane.h"
#include "daemon/transfer/session_table.h"
#include "proto/base/clock.h"

namespace crumb {

struct RpcContext {
  PageStore& store;
  SessionTable& session_table;
  SessionRegistry& sessions;
  ProfileRegistry& profiles;
  DemotePool& pool;
  Metrics& metrics;
  const Clock& clock;
  DeviceDemoter* demoter = nullptr;      // Null: the pool demotes on the CPU.
  UcxDataPlane* ucx = nullptr;           // Null: not offered.
  std::string memory_socket;             // Empty: not offered.
  std::vector<std::string> data_planes;  // In words: what is offered, and why what is not.
  std::string version;
  uint64_t epoch = 0;
  absl::Time start_time;
};

}  // namespace crumb
