// SPDX-License-Identifier: Apache-2.0
//
// Pulls of a published prefix over UCX from another process, beside what ucx_perftest reaches with
// active messages by rendezvous, the same transports, the same settings of UCX, the same message
// size and as many messages under way. An 8B model's pages (36 layers, 8 KV heads, head_dim 128),
// one after the other in the daemon's arena, and scattered between another prefix's; a pull ends
// when all bytes are in place and every checksum has been verified.
//
// Rounds of pulls and of ucx_perftest take turns, and what counts is the median of the rounds'
// ratios: a neighbour's load then hits both. ucx_perftest runs once spinning, its default, and once
// sleeping until there is work, as we do; the faster of the two is the round's limit, since a
// spinning process loses where cores are few and a sleeping one where they are idle.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <random>
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
constexpr int kRounds = 9;
constexpr int kPullsARound = 3;
constexpr uint32_t kMessageBytes = 1u << 20;
constexpr uint32_t kWindow = 8;
constexpr uint32_t kPages = 128;

struct Case {
  const char* name;
  const char* transports;
  bool scattered;
};

double Median(std::vector<double> values) {
  CRUMB_CHECK(!values.empty(), "something was measured");
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// GB/s of ucx_perftest; 0 when it is not there. `wait`: "poll" or "sleep".
double MeasurePerftest(const char* transports, const char* wait) {
  static int port = 18515;
  ++port;
  // As ucx_context.cc sets them.
  const std::string settings = absl::StrCat(
      "UCX_TLS=", transports,
      " UCX_NET_DEVICES=lo UCX_TCP_PUT_ENABLE=n UCX_TCP_TX_SEG_SIZE=256K UCX_TCP_RX_SEG_SIZE=512K "
      "UCX_CMA_MEMORY_INVALIDATE=y UCX_ZCOPY_THRESH=inf UCX_RNDV_THRESH=64K "
      "UCX_WARN_UNUSED_ENV_VARS=n ");
  const std::string test = absl::StrCat("ucx_perftest -t ucp_am_bw -e -f -w 16 -n 300 -I -E ", wait,
                                        " -s ", kMessageBytes, " -O ", kWindow, " -p ", port);
  const std::string command =
      absl::StrCat("(", settings, "timeout 20 ", test,
                   " >/dev/null 2>&1 &); for i in 1 2 3 4 5 6 7 8 9 10; do sleep 0.05; ", settings,
                   "timeout 20 ", test, " 127.0.0.1 2>/dev/null | tail -1 | grep . && break; done");
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

double ProcessSeconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
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

// Prefix 1, in one go, or page by page in turns with prefix 2, so that it lies in pieces.
void Publish(testing::TransferProcess& daemon, bool scattered) {
  if (!scattered) {
    daemon.Ask(absl::StrCat("publish 1 ", kPages));
    return;
  }
  std::mt19937 random(1);
  std::array<uint32_t, 2> pages{};
  while (pages[0] < kPages) {
    const uint32_t prefix = random() % 2;
    daemon.Ask(absl::StrCat("publish ", prefix + 1, " ", ++pages[prefix]));
  }
}

// What the rounds of one case gave, a value each.
struct Rounds {
  std::vector<double> pulled;
  std::vector<double> landed;
  std::vector<double> first_layer;
  std::vector<double> ratios;
  double cpu_seconds = 0;  // Of both ends.
  double gigabytes = 0;
};

void RunRound(const Case& of,
              testing::TransferProcess& daemon,
              PageTransport& transport,
              const LeasedPrefix& prefix,
              Rounds& rounds) {
  const double spinning = MeasurePerftest(of.transports, "poll");
  std::vector<double> pulled;
  const double before = daemon.CpuSeconds() + ProcessSeconds();
  for (int i = 0; i < kPullsARound; ++i) {
    const Pull pull = PullOnce(transport, prefix);
    const double gigabytes = static_cast<double>(pull.bytes) / 1e9;
    rounds.gigabytes += gigabytes;
    pulled.push_back(gigabytes / pull.seconds);
    rounds.landed.push_back(gigabytes / pull.landed_seconds);
    rounds.first_layer.push_back(pull.first_layer_seconds / pull.seconds);
  }
  rounds.cpu_seconds += daemon.CpuSeconds() + ProcessSeconds() - before;
  const double limit = std::max(spinning, MeasurePerftest(of.transports, "sleep"));
  rounds.pulled.push_back(Median(pulled));
  if (limit > 0) {
    rounds.ratios.push_back(rounds.pulled.back() / limit);
  }
}

void Measure(const Case& of) {
  testing::TransferProcess daemon({absl::StrCat("transports=", of.transports), "layers=36",
                                   "heads=8", "dim=128", "sink_pages=0", "capacity_mb=1024",
                                   absl::StrCat("window=", kWindow),
                                   absl::StrCat("chunk_bytes=", kMessageBytes)});
  const SessionInfo session = daemon.OpenSession(testing::MakeTransferProfile(kGeometry, 0));
  Publish(daemon, of.scattered);
  const LeasedPrefix prefix = daemon.Lookup(session, 1, kPages);
  UcxTransportOptions options;
  options.ucx.transports = of.transports;
  options.chunk_bytes = kMessageBytes;
  auto transport =
      ConnectUcxWithOptions(options, session, Clock::System().Now() + absl::Seconds(10));
  CRUMB_CHECK(transport.ok(), std::string(transport.status().message()).c_str());

  Rounds rounds;
  PullOnce(**transport, prefix);  // Touches the memory.
  for (int round = 0; round < kRounds; ++round) {
    daemon.Ask(absl::StrCat("renew ", session.id.value(), " ", prefix.lease.value()));
    RunRound(of, daemon, **transport, prefix, rounds);
  }
  const double value = Median(rounds.pulled);
  const double ratio = rounds.ratios.empty() ? 0 : Median(rounds.ratios);
  const double limit = ratio > 0 ? value / ratio : 0;
  absl::PrintF(
      "%-14s %5.2f GB/s verified, %5.2f landed, ucx_perftest %5.2f: %3.0f %% of it, limit 85 %% "
      "(rounds from %.0f to %.0f %%)  layer 0 after %.0f %%  both ends %.2f CPU s/GB\n",
      of.name, value, Median(rounds.landed), limit, 100 * ratio,
      rounds.ratios.empty() ? 0
                            : 100 * *std::min_element(rounds.ratios.begin(), rounds.ratios.end()),
      rounds.ratios.empty() ? 0
                            : 100 * *std::max_element(rounds.ratios.begin(), rounds.ratios.end()),
      100 * Median(rounds.first_layer), rounds.cpu_seconds / rounds.gigabytes);
  std::fflush(stdout);
  Register(absl::StrCat("UcxPull/", of.name),
           {.value = value,
            .limit = limit,
            .target = 0.85 * limit,
            .unit = "GB/s",
            .limit_name = "ucx_perftest ucp_am_bw by rendezvous, same transports, settings and "
                          "message size, in turns"});
  Register(absl::StrCat("UcxPull/", of.name, "/first_layer"),
           {.value = 100 * Median(rounds.first_layer),
            .limit = 100.0 / kGeometry.num_layers,
            .unit = "% of the pull",
            .limit_name = "its share of the bytes",
            .better = Better::kLower});
}

}  // namespace
}  // namespace crumb::bench

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  for (const crumb::bench::Case& of : {
           crumb::bench::Case{"cma/contiguous", "cma,tcp", false},
           crumb::bench::Case{"cma/scattered", "cma,tcp", true},
           crumb::bench::Case{"tcp/contiguous", "tcp", false},
           crumb::bench::Case{"tcp/scattered", "tcp", true},
       }) {
    crumb::bench::Measure(of);
  }
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
