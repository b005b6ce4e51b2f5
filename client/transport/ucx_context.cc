// SPDX-License-Identifier: Apache-2.0
#include "client/transport/ucx_context.h"

#include <arpa/inet.h>
#include <net/if.h>
#include <ucs/config/global_opts.h>

#include <cstdlib>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

#include "proto/base/status_macros.h"

namespace crumb {
namespace {

absl::StatusCode CodeOf(ucs_status_t status) {
  switch (status) {
    case UCS_OK:
      return absl::StatusCode::kOk;
    case UCS_ERR_CANCELED:
      return absl::StatusCode::kCancelled;
    case UCS_ERR_TIMED_OUT:
      return absl::StatusCode::kDeadlineExceeded;
    case UCS_ERR_NO_MEMORY:
    case UCS_ERR_NO_RESOURCE:
    case UCS_ERR_EXCEEDS_LIMIT:
      return absl::StatusCode::kResourceExhausted;
    case UCS_ERR_INVALID_PARAM:
      return absl::StatusCode::kInvalidArgument;
    case UCS_ERR_MESSAGE_TRUNCATED:
      return absl::StatusCode::kDataLoss;
    case UCS_ERR_NOT_IMPLEMENTED:
    case UCS_ERR_UNSUPPORTED:
      return absl::StatusCode::kUnimplemented;
    case UCS_ERR_UNREACHABLE:
    case UCS_ERR_INVALID_ADDR:
    case UCS_ERR_NO_DEVICE:
    case UCS_ERR_BUSY:
    case UCS_ERR_REJECTED:
    case UCS_ERR_NOT_CONNECTED:
    case UCS_ERR_CONNECTION_RESET:
    case UCS_ERR_ENDPOINT_TIMEOUT:
    case UCS_ERR_IO_ERROR:
      return absl::StatusCode::kUnavailable;
    default:
      return absl::StatusCode::kInternal;
  }
}

bool IsInEnvironment(const std::string& variable) {
  // Nothing of ours changes the environment.
  return std::getenv(variable.c_str()) != nullptr;  // NOLINT(concurrency-mt-unsafe)
}

// A configuration of UCX under construction.
class Config {
 public:
  static absl::StatusOr<Config> Read() {
    Config config;
    CRUMB_RETURN_IF_ERROR(
        UcxStatus(ucp_config_read(nullptr, nullptr, &config.config_), "reading settings"));
    return config;
  }
  Config(Config&& other) noexcept : config_(std::exchange(other.config_, nullptr)) {}
  Config& operator=(Config&&) = delete;
  Config(const Config&) = delete;
  Config& operator=(const Config&) = delete;
  ~Config() {
    if (config_ != nullptr) {
      ucp_config_release(config_);
    }
  }

  // `transport` is the prefix of the variable that UCX's table of transport settings leaves out.
  absl::Status Set(const char* transport, const char* name, const std::string& value) {
    const std::string variable = absl::StrCat("UCX_", transport, name);
    if (IsInEnvironment(variable)) {
      return absl::OkStatus();  // The operator's word, read already.
    }
    return UcxStatus(ucp_config_modify(config_, name, value.c_str()),
                     absl::StrCat(variable, "=", value));
  }
  ucp_config_t* get() const { return config_; }

 private:
  Config() = default;
  ucp_config_t* config_ = nullptr;
};

absl::StatusOr<Config> MakeConfig(const UcxOptions& options) {
  CRUMB_ASSIGN_OR_RETURN(Config config, Config::Read());
  CRUMB_RETURN_IF_ERROR(config.Set("", "TLS", options.transports));
  CRUMB_RETURN_IF_ERROR(config.Set("", "NET_DEVICES", options.devices));
  // The protocols of 1.13.1. The newer ones, on by default since 1.16, abort when a peer is lost
  // ("datatype_iter.inl:318 Assertion", in either of two runs of 1.16.0).
  CRUMB_RETURN_IF_ERROR(config.Set("", "PROTO_ENABLE", "n"));
  // With puts, 1.13.1 aborts when a peer is lost during a transfer on a busy machine.
  CRUMB_RETURN_IF_ERROR(config.Set("TCP_", "PUT_ENABLE", "n"));
  // Without a copy, 1.13.1 may complete a send twice when its peer is lost, and abort
  // ("uct_iface.h:884 Assertion comp->count > 0": 3 of 12 runs of 20 killed clients, none of 32
  // with one).
  CRUMB_RETURN_IF_ERROR(config.Set("", "ZCOPY_THRESH", "inf"));
  // The defaults, of 8 KiB, cost half of the bandwidth.
  CRUMB_RETURN_IF_ERROR(config.Set("TCP_", "TX_SEG_SIZE", "256K"));
  CRUMB_RETURN_IF_ERROR(config.Set("TCP_", "RX_SEG_SIZE", "512K"));
  if (!options.port_range.empty()) {
    CRUMB_RETURN_IF_ERROR(config.Set("TCP_", "PORT_RANGE", options.port_range));
  }
  if (absl::StrContains(options.transports, "cma")) {
    // Lets endpoints that report the death of their peer use cma at all.
    CRUMB_RETURN_IF_ERROR(config.Set("CMA_", "MEMORY_INVALIDATE", "y"));
  }
  return config;
}

// UCX goes on without a device that is not there, and then connects to nobody.
absl::Status CheckDevices(const std::string& devices) {
  const std::vector<std::string> names = absl::StrSplit(devices, ',');
  for (const std::string& device : names) {
    // RDMA devices are named device:port; "all" is all.
    if (device != "all" && !absl::StrContains(device, ':') && if_nametoindex(device.c_str()) == 0) {
      return absl::UnavailableError(absl::StrCat("UCX: no network device \"", device,
                                                 "\"; name devices as `ip link` does, or all"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status UcxStatus(ucs_status_t status, std::string_view what) {
  if (status == UCS_OK) {
    return absl::OkStatus();
  }
  return {CodeOf(status), absl::StrCat("UCX: ", absl::string_view(what.data(), what.size()), ": ",
                                       ucs_status_string(status))};
}

std::string UcxVersion() {
  return ucp_get_version_string();
}

absl::StatusOr<UcxContext> UcxContext::Open(const UcxOptions& options) {
  if (!IsInEnvironment("UCX_LOG_LEVEL")) {
    // Every error reaches a caller as a status; UCX would tell it to standard output as well.
    CRUMB_RETURN_IF_ERROR(
        UcxStatus(ucs_global_opts_set_value("LOG_LEVEL", "fatal"), "setting the log level"));
  }
  CRUMB_RETURN_IF_ERROR(CheckDevices(options.devices));
  CRUMB_ASSIGN_OR_RETURN(const Config config, MakeConfig(options));
  UcxContext opened;
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  const std::string what =
      absl::StrCat("transports \"", options.transports, "\" on devices \"", options.devices, "\"");
  CRUMB_RETURN_IF_ERROR(UcxStatus(ucp_init(&params, config.get(), &opened.context_), what));
  ucp_worker_params_t worker_params{};
  worker_params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  worker_params.thread_mode = UCS_THREAD_MODE_SINGLE;
  CRUMB_RETURN_IF_ERROR(
      UcxStatus(ucp_worker_create(opened.context_, &worker_params, &opened.worker_), what));
  CRUMB_RETURN_IF_ERROR(
      UcxStatus(ucp_worker_get_efd(opened.worker_, &opened.event_fd_), "wake-up descriptor"));
  return opened;
}

UcxContext::UcxContext(UcxContext&& other) noexcept
    : context_(std::exchange(other.context_, nullptr)),
      worker_(std::exchange(other.worker_, nullptr)),
      event_fd_(other.event_fd_) {}

UcxContext::~UcxContext() {
  if (worker_ != nullptr) {
    ucp_worker_destroy(worker_);
  }
  if (context_ != nullptr) {
    ucp_cleanup(context_);
  }
}

void UcxContext::Leak() {
  worker_ = nullptr;
  context_ = nullptr;
}

absl::StatusOr<SocketAddress> SocketAddress::Parse(const std::string& host, uint16_t port) {
  SocketAddress address;
  sockaddr_in v4{};
  sockaddr_in6 v6{};
  if (inet_pton(AF_INET, host.c_str(), &v4.sin_addr) == 1) {
    v4.sin_family = AF_INET;
    v4.sin_port = htons(port);
    reinterpret_cast<sockaddr_in&>(address.storage_) = v4;
    address.length_ = sizeof(v4);
  } else if (inet_pton(AF_INET6, host.c_str(), &v6.sin6_addr) == 1) {
    v6.sin6_family = AF_INET6;
    v6.sin6_port = htons(port);
    reinterpret_cast<sockaddr_in6&>(address.storage_) = v6;
    address.length_ = sizeof(v6);
  } else {
    return absl::InvalidArgumentError(absl::StrCat(
        "UCX address \"", host, "\": must be an IPv4 or IPv6 address in digits, as in 127.0.0.1"));
  }
  return address;
}

uint16_t SocketAddress::PortOf(const sockaddr_storage& address) {
  return ntohs(address.ss_family == AF_INET6
                   ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                   : reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

}  // namespace crumb
