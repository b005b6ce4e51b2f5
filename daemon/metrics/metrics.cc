// SPDX-License-Identifier: Apache-2.0
#include "daemon/metrics/metrics.h"

#include <array>
#include <atomic>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "prometheus/counter.h"
#include "prometheus/gauge.h"
#include "prometheus/histogram.h"
#include "prometheus/registry.h"
#include "prometheus/text_serializer.h"

#include "daemon/metrics/http_listener.h"
#include "daemon/metrics/store_collector.h"

namespace crumb {
namespace {

constexpr std::array<const char*, kNumRpcMethods> kMethodNames = {
    "Lookup",       "Probe",       "BeginPublish",  "WritePages", "CommitPublish",
    "AbortPublish", "RenewLeases", "ReleaseLeases", "Attach",     "Admin",
};
// gRPC's codes, by number; those of a later version count as UNKNOWN.
constexpr std::array<const char*, 17> kCodeNames = {
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
};

// From 25 us, as a lookup takes, to half a minute, as a long commit may.
prometheus::Histogram::BucketBoundaries LatencyBuckets() {
  return {25e-6, 50e-6, 100e-6, 200e-6, 400e-6, 1e-3, 2.5e-3, 5e-3, 10e-3,
          25e-3, 50e-3, 0.1,    0.25,   0.5,    1,    5,      30};
}

}  // namespace

class Metrics::Impl {
 public:
  Impl(const PageStore& store, const SessionTable& sessions, const std::string& version)
      : store_(store, sessions) {
    auto& codes = prometheus::BuildCounter()
                      .Name("crumb_rpcs_total")
                      .Help("Calls of the control plane answered, by method and gRPC code.")
                      .Register(registry_);
    auto& latencies = prometheus::BuildHistogram()
                          .Name("crumb_rpc_seconds")
                          .Help("Time from a call's arrival to its answer.")
                          .Register(registry_);
    rpcs_ = &codes;
    for (size_t method = 0; method < kNumRpcMethods; ++method) {
      ok_rpcs_[method] = &codes.Add({{"method", kMethodNames[method]}, {"code", "OK"}});
      rpc_seconds_[method] = &latencies.Add({{"method", kMethodNames[method]}}, LatencyBuckets());
    }
    auto& pages = prometheus::BuildHistogram()
                      .Name("crumb_write_page_seconds")
                      .Help("Time to check and write one published page, by how it came.")
                      .Register(registry_);
    const std::array<const char*, kNumPageWorks> works = {"copy", "cpu_demotion", "gpu_demotion"};
    for (size_t work = 0; work < kNumPageWorks; ++work) {
      page_seconds_[work] = &pages.Add({{"by", works[work]}}, LatencyBuckets());
    }
    gpu_demotion_failures_ = &prometheus::BuildCounter()
                                  .Name("crumb_gpu_demotion_failures_total")
                                  .Help("Pages demoted on the CPU since the GPU could not.")
                                  .Register(registry_)
                                  .Add({});
    checksum_failures_ = &prometheus::BuildCounter()
                              .Name("crumb_checksum_failures_total")
                              .Help("Published pages whose bytes had another checksum.")
                              .Register(registry_)
                              .Add({});
    auto& bytes = prometheus::BuildCounter()
                      .Name("crumb_transfer_bytes_total")
                      .Help("Page bytes moved over UCX, to engines (out) and from them (in).")
                      .Register(registry_);
    pulled_ = &bytes.Add({{"path", "ucx"}, {"direction", "out"}});
    pushed_ = &bytes.Add({{"path", "ucx"}, {"direction", "in"}});
    auto& seconds = prometheus::BuildHistogram()
                        .Name("crumb_transfer_seconds")
                        .Help("Time of one transfer over UCX.")
                        .Register(registry_);
    pull_seconds_ = &seconds.Add({{"path", "ucx"}, {"direction", "out"}}, LatencyBuckets());
    push_seconds_ = &seconds.Add({{"path", "ucx"}, {"direction", "in"}}, LatencyBuckets());
    prometheus::BuildGauge()
        .Name("crumb_start_time_seconds")
        .Help("When the daemon started, in Unix time.")
        .Register(registry_)
        .Add({})
        .SetToCurrentTime();
    prometheus::BuildGauge()
        .Name("crumb_build_info")
        .Help("1, labelled with the daemon's version.")
        .Register(registry_)
        .Add({{"version", version}})
        .Set(1);
  }

  absl::StatusOr<uint16_t> Listen(const std::string& address) {
    auto listener = HttpListener::Create(address, [this] { return Text(); });
    if (!listener.ok()) {
      return absl::UnavailableError(absl::StrCat(
          "metrics address ", address, " cannot be listened on (", listener.status().message(),
          "): free the port, or set another by [listen] metrics, or none"));
    }
    listener_ = *std::move(listener);
    return listener_->port();
  }

  std::string Text() const {
    std::vector<prometheus::MetricFamily> families = registry_.Collect();
    std::vector<prometheus::MetricFamily> of_store = store_.Collect();
    families.insert(families.end(), of_store.begin(), of_store.end());
    return prometheus::TextSerializer().Serialize(families);
  }

 private:
  friend class Metrics;

  prometheus::Registry registry_;
  const StoreCollector store_;
  prometheus::Family<prometheus::Counter>* rpcs_ = nullptr;
  std::array<prometheus::Counter*, kNumRpcMethods> ok_rpcs_{};
  std::array<prometheus::Histogram*, kNumRpcMethods> rpc_seconds_{};
  std::array<prometheus::Histogram*, kNumPageWorks> page_seconds_{};
  std::atomic<uint64_t> num_gpu_demotion_failures_ = 0;
  prometheus::Counter* gpu_demotion_failures_ = nullptr;
  prometheus::Counter* checksum_failures_ = nullptr;
  prometheus::Counter* pulled_ = nullptr;
  prometheus::Counter* pushed_ = nullptr;
  prometheus::Histogram* pull_seconds_ = nullptr;
  prometheus::Histogram* push_seconds_ = nullptr;
  std::unique_ptr<HttpListener> listener_;  // Last, as it reads all of these.
};

Metrics::Metrics(const PageStore& store, const SessionTable& sessions, const std::string& version)
    : impl_(std::make_unique<Impl>(store, sessions, version)) {}

Metrics::~Metrics() = default;

absl::StatusOr<uint16_t> Metrics::Listen(const std::string& address) {
  return impl_->Listen(address);
}

void Metrics::OnRpc(RpcMethod method, absl::StatusCode code, absl::Duration duration) {
  const auto index = static_cast<size_t>(method);
  impl_->rpc_seconds_[index]->Observe(absl::ToDoubleSeconds(duration));
  if (code == absl::StatusCode::kOk) {
    impl_->ok_rpcs_[index]->Increment();
  } else {
    const auto number = static_cast<size_t>(code);
    impl_->rpcs_
        ->Add({{"method", kMethodNames[index]},
               {"code", number < kCodeNames.size() ? kCodeNames[number] : "UNKNOWN"}})
        .Increment();
  }
}

void Metrics::OnPageWritten(PageWork work, absl::Duration duration) {
  impl_->page_seconds_[static_cast<size_t>(work)]->Observe(absl::ToDoubleSeconds(duration));
}

uint64_t Metrics::OnGpuDemotionFailure() {
  impl_->gpu_demotion_failures_->Increment();
  return ++impl_->num_gpu_demotion_failures_;
}

void Metrics::OnChecksumFailure() {
  impl_->checksum_failures_->Increment();
}

void Metrics::OnPulled(uint64_t bytes, absl::Duration duration) {
  impl_->pulled_->Increment(static_cast<double>(bytes));
  impl_->pull_seconds_->Observe(absl::ToDoubleSeconds(duration));
}

void Metrics::OnPushed(uint64_t bytes, absl::Duration duration) {
  impl_->pushed_->Increment(static_cast<double>(bytes));
  impl_->push_seconds_->Observe(absl::ToDoubleSeconds(duration));
}

uint64_t Metrics::pulled_bytes() const {
  return static_cast<uint64_t>(impl_->pulled_->Value());
}

uint64_t Metrics::checksum_failures() const {
  return static_cast<uint64_t>(impl_->checksum_failures_->Value());
}

std::string Metrics::Text() const {
  return impl_->Text();
}

}  // namespace crumb
