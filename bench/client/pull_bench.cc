// SPDX-License-Identifier: Apache-2.0
//
// Pulls of a published prefix over UCX from another process, beside what ucx_perftest reaches with
// active messages by rendezvous, the same transports, settings and message size, in turns. An 8B
// model's pages (36 layers, 8 KV heads, head_dim 128), scattered over the daemon's arena; a pull
// ends when all bytes are in place and every checksum has been verified.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"

#include "bench/support/figure.h"
#include "client/transport/ucx_transport.h"
#include "proto/base/check.h"
#include "tests/support/transfer_pages.h"
#include "tests/support/transfer_process.h"

namespace crumb::bench {
namespace {

constexpr Geometry kGeometry{.num_layers = 36, .num_kv_heads = 8, .key_dim = 128, .value_dim = 128};
constexpr int kRounds = 7;
constexpr int kPullsARound = 4;
constexpr uint32_t kMessageBytes = 1u << 20;
constexpr uint32_t kWindow = 8;

struct Case {
  const char* name;
  const char* transports;
  PageEncoding encoding;
  uint32_t pages;
};

double Median(std::vector<double> values) {
  CRUMB_CHECK(!values.empty(), "something was measured");
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// GB/s of ucx_perftest; 0 when it is not there.
double MeasurePerftest(const char* transports) {
  static int port = 18515;
  ++port;
  const std::string settings = absl::StrCat(
      "UCX_TLS=", transports,
      " UCX_NET_DEVICES=lo UCX_TCP_PUT_ENABLE=n UCX_TCP_TX_SEG_SIZE=256K UCX_TCP_RX_SEG_SIZE=512K "
      "UCX_CMA_MEMORY_INVALIDATE=y UCX_RNDV_THRESH=64K UCX_WARN_UNUSED_ENV_VARS=n ");
  const std::string test = absl::StrCat("ucx_perftest -t ucp_am_bw -e -f -w 16 -n 400 -s ",
                                        kMessageBytes, " -O ", kWindow, " -p ", port);
  const std::string command = absl::StrCat(
      "(", settings, test, " >/dev/null 2>&1 &); for i in 1 2 3 4 5 6 7 8 9 10; do sleep 0.1; ",
      settings, test, " 127.0.0.1 2>/dev/null | tail -1 && break; done");
  std::FILE* output = popen(command.c_str(), "r");
  std::array<double, 6> columns{};
  for (double& column : columns) {
    if (output == nullptr || std::fscanf(output, "%lf", &column) != 1) {
      column = 0;
    }
  }
  pclose(output);
  return columns[5] * (1 << 20) / 1e9;  // It calls MiB MB.
}

struct Pull {
  double seconds = 0;
  double first_layer_seconds = 0;
  double landed_seconds = 0;
  size_t bytes = 0;
};

Pull PullOnce(PageTransport& transport, const LeasedPrefix& prefix) {
  const absl::Time start = absl::Now();
  auto source = transport.Open(prefix, Clock::System().Now() + absl::Seconds(30));
  CRUMB_CHECK(source.ok(), std::string(source.status().message()).c_str());
  const absl::Status first = (*source)->WaitForLayer(0);
  CRUMB_CHECK(first.ok(), std::string(first.message()).c_str());
  Pull pull;
  pull.first_layer_seconds = absl::ToDoubleSeconds(absl::Now() - start);
  const absl::Status last = (*source)->WaitForLayer(kGeometry.num_layers - 1);
  CRUMB_CHECK(last.ok(), std::string(last.message()).c_str());
  pull.landed_seconds = absl::ToDoubleSeconds(absl::Now() - start);
  const absl::Status valid = (*source)->Validate();
  CRUMB_CHECK(valid.ok(), std::string(valid.message()).c_str());
  pull.seconds = absl::ToDoubleSeconds(absl::Now() - start);
  pull.bytes = (*source)->copied_bytes();
  return pull;
}

void Measure(const Case& of) {
  const uint32_t sink_pages = of.encoding == PageEncoding::kBf16 ? of.pages : 0;
  testing::TransferProcess daemon({absl::StrCat("transports=", of.transports), "layers=36",
                                   "heads=8", "dim=128", absl::StrCat("sink_pages=", sink_pages),
                                   "capacity_mb=1024", absl::StrCat("window=", kWindow),
                                   absl::StrCat("chunk_bytes=", kMessageBytes)});
  const SessionInfo session =
      daemon.OpenSession(testing::MakeTransferProfile(kGeometry, sink_pages));
  daemon.Ask(absl::StrCat("publish 1 ", of.pages));
  const LeasedPrefix prefix = daemon.Lookup(session, 1, of.pages);
  UcxTransportOptions options;
  options.ucx.transports = of.transports;
  options.chunk_bytes = kMessageBytes;
  auto transport =
      ConnectUcxWithOptions(options, session, Clock::System().Now() + absl::Seconds(10));
  CRUMB_CHECK(transport.ok(), std::string(transport.status().message()).c_str());

  std::vector<double> pulled;
  std::vector<double> landed;
  std::vector<double> limits;
  std::vector<double> first_layer;
  double cpu_seconds_a_gb = 0;
  PullOnce(**transport, prefix);  // Touches the memory.
  for (int round = 0; round < kRounds; ++round) {
    if (const double limit = MeasurePerftest(of.transports); limit > 0) {
      limits.push_back(limit);
    }
    const double cpu = daemon.CpuSeconds();
    double gigabytes = 0;
    for (int i = 0; i < kPullsARound; ++i) {
      const Pull pull = PullOnce(**transport, prefix);
      gigabytes += static_cast<double>(pull.bytes) / 1e9;
      pulled.push_back(static_cast<double>(pull.bytes) / pull.seconds / 1e9);
      landed.push_back(static_cast<double>(pull.bytes) / pull.landed_seconds / 1e9);
      first_layer.push_back(pull.first_layer_seconds / pull.seconds);
    }
    cpu_seconds_a_gb += (daemon.CpuSeconds() - cpu) / gigabytes / kRounds;
  }
  // The best round is the limit: ucx_perftest spins at both ends, so other work on the machine
  // hurts it more than us, and a median would flatter the ratio.
  const double limit = limits.empty() ? 0 : *std::max_element(limits.begin(), limits.end());
  absl::PrintF(
      "%-12s %u pages  %5.2f GB/s verified (%5.2f landed)  ucx_perftest %5.2f  ratio %.2f  "
      "layer 0 after %.0f %% of the pull  daemon %.2f CPU s/GB\n",
      of.name, of.pages, Median(pulled), Median(landed), limit,
      limit > 0 ? Median(pulled) / limit : 0, 100 * Median(first_layer), cpu_seconds_a_gb);
  std::fflush(stdout);
  Register(absl::StrCat("UcxPull/", of.name),
           {.value = Median(pulled),
            .limit = limit,
            .target = 0.85 * limit,
            .unit = "GB/s",
            .limit_name = "best round of ucx_perftest ucp_am_bw by rendezvous, same transports and "
                          "message size"});
  Register(absl::StrCat("UcxPull/", of.name, "/first_layer"),
           {.value = 100 * Median(first_layer),
            .limit = 100.0 / kGeometry.num_layers,
            .unit = "% of the pull",
            .limit_name = "its share of the bytes",
            .better = Better::kLower});
}

}  // namespace
}  // namespace crumb::bench

int main(int argc, char** argv) {
  using crumb::PageEncoding;
  benchmark::Initialize(&argc, argv);
  for (const crumb::bench::Case& of : {
           crumb::bench::Case{"cma/int2", "cma,tcp", PageEncoding::kInt2, 128},
           crumb::bench::Case{"tcp/int2", "tcp", PageEncoding::kInt2, 128},
           crumb::bench::Case{"cma/bf16", "cma,tcp", PageEncoding::kBf16, 16},
           crumb::bench::Case{"tcp/bf16", "tcp", PageEncoding::kBf16, 16},
       }) {
    crumb::bench::Measure(of);
  }
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
