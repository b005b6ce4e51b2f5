// SPDX-License-Identifier: Apache-2.0
//
// The daemon's configuration: one table of keys, from which the file's reader, the flags, the help
// and --print-config all come, so that none of them can know a key that another does not.
// deploy/crumbd.toml lists every key with its default, and a test holds it to this table.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "daemon/demote/demote_pool.h"
#include "daemon/log/log.h"
#include "daemon/store/store_types.h"

namespace crumb {

struct UcxConfig {
  bool enabled = false;
  std::string host = "127.0.0.1";
  uint16_t port = 0;  // 0: any free one.
  std::string transports = "cma,tcp";
};

struct GpuConfig {
  size_t arena_bytes = 0;  // 0: none.
  size_t chunk_bytes = size_t{128} << 20;
  uint32_t device = 0;
};

struct Config {
  std::string unix_socket = "/run/crumb/crumbd.sock";
  uint32_t unix_socket_mode = 0660;
  std::string tcp;  // Empty: no TCP.
  bool insecure = false;
  std::string metrics = "127.0.0.1:9464";  // Empty: no metrics.
  StoreOptions store;
  GpuConfig gpu;
  DemotePool::Options demote{.num_threads = 0};  // 0: half of the cores, at least 2.
  absl::Duration drain_timeout = absl::Seconds(10);
  UcxConfig ucx;
  LogLevel log_level = LogLevel::kInfo;
  LogFormat log_format = LogFormat::kText;

  // Beside the Unix socket.
  std::string memory_socket() const { return unix_socket + ".mem"; }
};

// What the file may hold for a key, as TOML has it. Text in the file is in quotes.
enum class ConfigKind { kText, kNumber, kFlag, kSize };

struct ConfigKey {
  std::string_view path;   // "store.capacity": section and name; the flag is --store.capacity.
  std::string_view value;  // What a value is called in the help: SIZE.
  ConfigKind kind;
  std::string_view doc;  // One or more sentences.
  // INVALID_ARGUMENT says how to write the value; `config` is untouched then.
  absl::Status (*set)(std::string_view text, Config& config);
  std::string (*get)(const Config& config);  // Text that `set` takes.
};

// By section, in the order in which they are printed.
std::span<const ConfigKey> ConfigKeys();

// INVALID_ARGUMENT: no such key; names the nearest.
absl::StatusOr<const ConfigKey*> FindConfigKey(std::string_view path);

// What no single key can tell: INVALID_ARGUMENT, naming the keys. Call it when all are set.
absl::Status CheckConfig(const Config& config);

// A configuration file that says just this, with the keys' descriptions as comments.
std::string PrintConfig(const Config& config);

// The one of `known` with the least edits from `text`; empty if none is near.
std::string_view NearestName(std::string_view text, std::span<const std::string_view> known);

}  // namespace crumb
