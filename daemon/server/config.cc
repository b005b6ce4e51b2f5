// SPDX-License-Identifier: Apache-2.0
#include "daemon/server/config.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <vector>

#include "absl/strings/str_cat.h"

#include "daemon/server/units.h"
#include "proto/base/status_macros.h"
#include "proto/page/chunk_layout.h"

namespace crumb {
namespace {

// Of memory: a page of the machine, as the store's chunks are aligned.
constexpr size_t kMinBytes = kChunkAlignment;
// A lease that is shorter ends before an engine can renew it; leases are told in milliseconds of 32
// bits, and nothing here is meant for days.
constexpr absl::Duration kMinLease = absl::Milliseconds(100);
constexpr absl::Duration kMaxTime = absl::Hours(24);

template <typename Number>
absl::Status SetNumber(std::string_view text, uint64_t min, uint64_t max, Number& target) {
  CRUMB_ASSIGN_OR_RETURN(const uint64_t number, ParseNumber(text, min, max));
  target = static_cast<Number>(number);
  return absl::OkStatus();
}

absl::Status SetText(std::string_view text, std::string& target) {
  target = text;
  return absl::OkStatus();
}

absl::Status SetBytes(std::string_view text, size_t min, size_t& target) {
  CRUMB_ASSIGN_OR_RETURN(const uint64_t bytes, ParseBytes(text));
  if (bytes < min) {
    return absl::InvalidArgumentError(absl::StrCat(
        "\"", std::string(text), "\" is too little: ", FormatBytes(min), " at least are needed"));
  }
  target = bytes;
  return absl::OkStatus();
}

absl::Status SetDuration(std::string_view text, absl::Duration min, absl::Duration& target) {
  CRUMB_ASSIGN_OR_RETURN(const absl::Duration duration, ParseDurationText(text));
  if (duration < min || duration > kMaxTime) {
    return absl::InvalidArgumentError(absl::StrCat("\"", std::string(text), "\" is no time from ",
                                                   absl::FormatDuration(min), " to ",
                                                   absl::FormatDuration(kMaxTime)));
  }
  target = duration;
  return absl::OkStatus();
}

absl::Status SetFlag(std::string_view text, bool& target) {
  CRUMB_ASSIGN_OR_RETURN(target, ParseFlag(text));
  return absl::OkStatus();
}

// An address, or "none". (Nothing at all would do in a file, but CLI11 takes no empty value.)
absl::Status SetAddress(std::string_view text, std::string& target) {
  if (text.empty() || text == "none") {
    target.clear();
    return absl::OkStatus();
  }
  CRUMB_RETURN_IF_ERROR(ParseHostPort(text).status());
  return SetText(text, target);
}

std::string AddressText(const std::string& address) {
  return address.empty() ? "none" : address;
}

absl::Status SetLogLevel(std::string_view text, LogLevel& target) {
  constexpr std::array<std::string_view, 5> kNames = {"debug", "info", "warning", "error", "off"};
  const auto* const found = std::find(kNames.begin(), kNames.end(), text);
  if (found == kNames.end()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "\"", std::string(text), "\" is no level: write debug, info, warning, error or off"));
  }
  target = static_cast<LogLevel>(found - kNames.begin());
  return absl::OkStatus();
}

std::string LogLevelName(LogLevel level) {
  constexpr std::array<const char*, 5> kNames = {"debug", "info", "warning", "error", "off"};
  return kNames[static_cast<size_t>(level)];
}

absl::Status SetLogFormat(std::string_view text, LogFormat& target) {
  if (text != "text" && text != "json") {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", std::string(text), "\" is no format: write text or json"));
  }
  target = text == "json" ? LogFormat::kJson : LogFormat::kText;
  return absl::OkStatus();
}

std::string FlagText(bool flag) {
  return flag ? "true" : "false";
}

using Text = std::string_view;

constexpr std::array kKeys = {
    ConfigKey{"listen.unix_socket", "PATH", ConfigKind::kText,
              "Unix socket of the control plane. The memory socket, by which engines map pages, "
              "lies beside it: PATH.mem.",
              [](Text t, Config& c) { return SetText(t, c.unix_socket); },
              [](const Config& c) { return c.unix_socket; }},
    ConfigKey{"listen.unix_socket_mode", "MODE", ConfigKind::kText,
              "Permissions of both sockets, in octal. Whoever can open them can use the service.",
              [](Text t, Config& c) {
                CRUMB_ASSIGN_OR_RETURN(c.unix_socket_mode, ParseMode(t));
                return absl::OkStatus();
              },
              [](const Config& c) { return FormatMode(c.unix_socket_mode); }},
    ConfigKey{"listen.tcp", "HOST:PORT", ConfigKind::kText,
              "TCP address of the control plane, in clear text, or none. Loopback only, unless "
              "insecure is true.",
              [](Text t, Config& c) { return SetAddress(t, c.tcp); },
              [](const Config& c) { return AddressText(c.tcp); }},
    ConfigKey{"listen.insecure", "BOOL", ConfigKind::kFlag,
              "Let tcp and ucx listen beyond loopback, without encryption or authentication: "
              "whoever reaches them is trusted.",
              [](Text t, Config& c) { return SetFlag(t, c.insecure); },
              [](const Config& c) { return FlagText(c.insecure); }},
    ConfigKey{"listen.metrics", "HOST:PORT", ConfigKind::kText,
              "Address of Prometheus' /metrics over HTTP, or none.",
              [](Text t, Config& c) { return SetAddress(t, c.metrics); },
              [](const Config& c) { return AddressText(c.metrics); }},
    ConfigKey{
        "listen.drain_timeout", "TIME", ConfigKind::kText,
        "How long unfinished publishes are waited for at SIGTERM.",
        [](Text t, Config& c) { return SetDuration(t, absl::Milliseconds(1), c.drain_timeout); },
        [](const Config& c) { return absl::FormatDuration(c.drain_timeout); }},
    ConfigKey{"store.capacity", "SIZE", ConfigKind::kSize,
              "Host memory for pages. When it is full, the pages used longest ago are evicted.",
              [](Text t, Config& c) { return SetBytes(t, kMinBytes, c.store.capacity_bytes); },
              [](const Config& c) { return FormatBytes(c.store.capacity_bytes); }},
    ConfigKey{"store.chunk", "SIZE", ConfigKind::kSize,
              "Memory is taken from the system in chunks of at most this size, each of one "
              "namespace. A chunk holds one page at least.",
              [](Text t, Config& c) { return SetBytes(t, kMinBytes, c.store.chunk_bytes); },
              [](const Config& c) { return FormatBytes(c.store.chunk_bytes); }},
    ConfigKey{"store.gpu_arena", "SIZE", ConfigKind::kSize,
              "GPU memory for copies of the pages used last, read in place by engines on the same "
              "GPU; 0: none. Taken at the start, in whole chunks of gpu_chunk. Without a GPU the "
              "daemon says so and serves from host memory.",
              [](Text t, Config& c) { return SetBytes(t, 0, c.gpu.arena_bytes); },
              [](const Config& c) { return FormatBytes(c.gpu.arena_bytes); }},
    ConfigKey{"store.gpu_chunk", "SIZE", ConfigKind::kSize,
              "GPU memory is given to namespaces in chunks of this size, two at least for each. "
              "Each costs the daemon a file descriptor.",
              [](Text t, Config& c) { return SetBytes(t, kMinBytes, c.gpu.chunk_bytes); },
              [](const Config& c) { return FormatBytes(c.gpu.chunk_bytes); }},
    ConfigKey{"store.gpu_device", "N", ConfigKind::kNumber,
              "Number of the GPU, as CUDA counts them in the daemon's process.",
              [](Text t, Config& c) { return SetNumber(t, 0, 63, c.gpu.device); },
              [](const Config& c) { return std::to_string(c.gpu.device); }},
    ConfigKey{"store.lease", "TIME", ConfigKind::kText,
              "How long an engine may read what it looked up before it must renew: 100ms to 24h.",
              [](Text t, Config& c) { return SetDuration(t, kMinLease, c.store.lease); },
              [](const Config& c) { return absl::FormatDuration(c.store.lease); }},
    ConfigKey{
        "store.quarantine", "TIME", ConfigKind::kText,
        "How long pages of a lease that ran out are kept from reuse: longer than any "
        "transfer takes, and at most 24h.",
        [](Text t, Config& c) { return SetDuration(t, absl::Milliseconds(1), c.store.quarantine); },
        [](const Config& c) { return absl::FormatDuration(c.store.quarantine); }},
    ConfigKey{"store.max_sessions", "N", ConfigKind::kNumber, "Engines attached at a time.",
              [](Text t, Config& c) { return SetNumber(t, 1, 1u << 20, c.store.max_sessions); },
              [](const Config& c) { return std::to_string(c.store.max_sessions); }},
    ConfigKey{"demote.threads", "N", ConfigKind::kNumber,
              "Threads that check and demote published pages; 0: half of the cores, at least "
              "2.",
              [](Text t, Config& c) { return SetNumber(t, 0, 1024, c.demote.num_threads); },
              [](const Config& c) { return std::to_string(c.demote.num_threads); }},
    ConfigKey{
        "demote.queue", "N", ConfigKind::kNumber,
        "Publishes, or parts of long ones, that may wait for these threads or run on them; one "
        "more is refused with RESOURCE_EXHAUSTED.",
        [](Text t, Config& c) { return SetNumber(t, 1, 65536, c.demote.max_jobs); },
        [](const Config& c) { return std::to_string(c.demote.max_jobs); }},
    ConfigKey{"ucx.enabled", "BOOL", ConfigKind::kFlag,
              "Offer pages over UCX too. UCX has no authentication: whoever reaches its ports must "
              "be trusted like the daemon itself.",
              [](Text t, Config& c) { return SetFlag(t, c.ucx.enabled); },
              [](const Config& c) { return FlagText(c.ucx.enabled); }},
    ConfigKey{"ucx.host", "HOST", ConfigKind::kText,
              "IP address that UCX listens on. Loopback only, unless insecure is true.",
              [](Text t, Config& c) { return SetText(t, c.ucx.host); },
              [](const Config& c) { return c.ucx.host; }},
    ConfigKey{"ucx.port", "PORT", ConfigKind::kNumber, "Port that UCX listens on; 0: any free one.",
              [](Text t, Config& c) { return SetNumber(t, 0, 65535, c.ucx.port); },
              [](const Config& c) { return std::to_string(c.ucx.port); }},
    ConfigKey{"ucx.transports", "LIST", ConfigKind::kText,
              "UCX transports to choose from (UCX_TLS), unless the environment sets them.",
              [](Text t, Config& c) { return SetText(t, c.ucx.transports); },
              [](const Config& c) { return c.ucx.transports; }},
    ConfigKey{"log.level", "LEVEL", ConfigKind::kText,
              "What is logged at the least: debug, info, warning, error or off.",
              [](Text t, Config& c) { return SetLogLevel(t, c.log_level); },
              [](const Config& c) { return LogLevelName(c.log_level); }},
    ConfigKey{"log.format", "FORMAT", ConfigKind::kText,
              "text (key=value) or json, a line an event.",
              [](Text t, Config& c) { return SetLogFormat(t, c.log_format); },
              [](const Config& c) {
                return std::string(c.log_format == LogFormat::kJson ? "json" : "text");
              }},
};

// Levenshtein's, one row at a time.
size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substituted = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substituted});
    }
  }
  return row[b.size()];
}

// As TOML's basic strings have it.
std::string Quoted(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      quoted.push_back('\\');
    }
    quoted.push_back(c);
  }
  return quoted + "\"";
}

// Wraps `doc` into comment lines.
void AppendComment(std::string_view doc, std::string& out) {
  constexpr size_t kColumns = 98;
  while (!doc.empty()) {
    size_t length = doc.size();
    if (length > kColumns) {
      length = doc.rfind(' ', kColumns);
    }
    absl::StrAppend(&out, "# ", std::string(doc.substr(0, length)), "\n");
    doc.remove_prefix(std::min(doc.size(), length + 1));
  }
}

}  // namespace

std::span<const ConfigKey> ConfigKeys() {
  return kKeys;
}

std::string_view NearestName(std::string_view text, std::span<const std::string_view> known) {
  std::string_view nearest;
  // Farther than half of the text is no typing error.
  size_t least = std::max<size_t>(text.size() / 2, 2) + 1;
  for (const std::string_view name : known) {
    if (const size_t distance = EditDistance(text, name); distance < least) {
      least = distance;
      nearest = name;
    }
  }
  return nearest;
}

absl::StatusOr<const ConfigKey*> FindConfigKey(std::string_view path) {
  std::vector<std::string_view> paths;
  for (const ConfigKey& key : kKeys) {
    if (key.path == path) {
      return &key;
    }
    paths.push_back(key.path);
  }
  std::string message = absl::StrCat("unknown key ", std::string(path));
  if (const std::string_view nearest = NearestName(path, paths); !nearest.empty()) {
    absl::StrAppend(&message, "; did you mean ", std::string(nearest), "?");
  } else {
    message += "; `crumbd --print-config` lists all keys";
  }
  return absl::InvalidArgumentError(message);
}

absl::Status CheckConfig(const Config& config) {
  if (config.unix_socket.empty()) {
    return absl::InvalidArgumentError("listen.unix_socket is empty: the daemon needs one");
  }
  if (!config.tcp.empty() && !config.insecure) {
    CRUMB_ASSIGN_OR_RETURN(const HostPort address, ParseHostPort(config.tcp));
    if (!IsLoopback(address.host)) {
      return absl::InvalidArgumentError(
          absl::StrCat("listen.tcp is ", config.tcp,
                       ", beyond loopback and in clear text: use 127.0.0.1, or "
                       "set listen.insecure = true if everyone who reaches it is trusted"));
    }
  }
  if (config.gpu.arena_bytes > config.store.capacity_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "store.gpu_arena is ", FormatBytes(config.gpu.arena_bytes), ", store.capacity ",
        FormatBytes(config.store.capacity_bytes),
        ": pages on the GPU are copies of pages in host memory, so raise capacity to as much at "
        "least"));
  }
  if (config.gpu.arena_bytes > 0 && config.gpu.arena_bytes < config.gpu.chunk_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "store.gpu_arena is ", FormatBytes(config.gpu.arena_bytes), ", less than one gpu_chunk of ",
        FormatBytes(config.gpu.chunk_bytes), ": raise it, or lower gpu_chunk"));
  }
  if (config.ucx.enabled && !IsIpAddress(config.ucx.host)) {
    return absl::InvalidArgumentError(
        absl::StrCat("ucx.host is \"", config.ucx.host,
                     "\": UCX takes an IP address in digits, as in 127.0.0.1 or ::1"));
  }
  if (config.ucx.enabled && !config.insecure && !IsLoopback(config.ucx.host)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "ucx.host is ", config.ucx.host,
        ", beyond loopback, and UCX has no authentication: use "
        "127.0.0.1, or set listen.insecure = true if everyone who reaches it is trusted"));
  }
  return absl::OkStatus();
}

std::string PrintConfig(const Config& config) {
  std::string out;
  std::string_view section;
  for (const ConfigKey& key : kKeys) {
    const size_t dot = key.path.find('.');
    if (key.path.substr(0, dot) != section) {
      section = key.path.substr(0, dot);
      absl::StrAppend(&out, out.empty() ? "" : "\n", "[", std::string(section), "]\n");
    }
    AppendComment(key.doc, out);
    const std::string value = key.get(config);
    const bool bare = key.kind == ConfigKind::kNumber || key.kind == ConfigKind::kFlag;
    absl::StrAppend(&out, std::string(key.path.substr(dot + 1)), " = ",
                    bare ? value : Quoted(value), "\n");
  }
  return out;
}

}  // namespace crumb
