// SPDX-License-Identifier: Apache-2.0
//
// Pulls of a published prefix over UCX from another process, beside what ucx_perftest reaches with
// active messages by rendezvous, the same transports and the same settings of UCX. An 8B model's
// pages (36 layers, 8 KV heads, head_dim 128), one after the other in the daemon's arena, and
// scattered between another prefix's. Two figures of each: landed, when all bytes of the pages are
// in place, and verified, when every checksum has been compared too, which always follows.
//
// Two limits. "Same size": messages as large as the whole pull, one at a time, whose memory has
// been written to (written_memory.cc says why), as pages have. "Hot": ucx_perftest as it is, one
// buffer of a page's size that is sent again and again from the cache, as many under way as ours.
// By cma a third: what one process_vm_readv after the other reaches of as much cold memory, and of
// a hot page (foreign_memory.h).
//
// Pulls and ucx_perftest take turns, and what counts is the median of the rounds' ratios: a
// neighbour's load then hits both. ucx_perftest runs once spinning, its default, and once sleeping
// until there is work, as we do; the faster of the two is the round's limit, since a spinning
// process loses where cores are few and a sleeping one where they are idle. Pulls have two turns as
// well, after either, and the faster counts: a virtual machine's cores can be half as fast for a
// second, and who has one chance meets that more often than who has two.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <iterator>
#include <random>
#include <regex>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"

#include "bench/client/foreign_memory.h"
#include "bench/support/figure.h"
#include "client/transport/ucx_transport.h"
#include "proto/base/check.h"
#include "tests/support/transfer_pages.h"
#include "tests/support/transfer_process.h"

namespace crumb::bench {
namespace {

constexpr Geometry kGeometry{.num_layers = 36, .num_kv_heads = 8, .key_dim = 128, .value_dim = 128};
constexpr int kRounds = 9;
constexpr int kPullsATurn = 5;
constexpr uint32_t kMessageBytes = 1u << 20;
constexpr uint32_t kWindow = 16;  // PullSender::Options::window.
constexpr uint32_t kPages = 128;
constexpr size_t kPageBytes = kGeometry.PageBytes(PageEncoding::kInt2);
constexpr size_t kPullBytes = kPages * kPageBytes;

struct Case {
  const char* name;
  const char* transports;
  bool scattered;
};

bool UsesCma(const Case& of) {
  return std::string_view(of.transports).starts_with("cma");
}

double Median(std::vector<double> values) {
  CRUMB_CHECK(!values.empty(), "something was measured");
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// What ucx_perftest is to send.
struct Traffic {
  size_t message_bytes;
  uint32_t window;
  uint32_t messages;
  bool written;  // Its memory.
};
constexpr Traffic kSameSize{kPullBytes, 1, 5, true};
constexpr Traffic kHot{kPageBytes, kWindow, 200, false};

// GB/s of ucx_perftest; 0 when it is not there. `wait`: "poll" or "sleep".
double RunPerftest(const char* transports, const Traffic& traffic, const char* wait) {
  static int port = 18515;
  ++port;
  // As ucx_context.cc sets them.
  const std::string settings = absl::StrCat(
      "UCX_TLS=", transports,
      " UCX_NET_DEVICES=lo UCX_TCP_PUT_ENABLE=n UCX_TCP_TX_SEG_SIZE=256K UCX_TCP_RX_SEG_SIZE=512K "
      "UCX_CMA_MEMORY_INVALIDATE=y UCX_ZCOPY_THRESH=inf UCX_RNDV_THRESH=64K "
      "UCX_WARN_UNUSED_ENV_VARS=n ",
      traffic.written ? "UCX_MEM_MMAP_HOOK_MODE=none LD_PRELOAD=" CRUMB_WRITTEN_MEMORY " " : "");
  const std::string test = absl::StrCat(
      "ucx_perftest -t ucp_am_bw -e -f -w ", traffic.window * 2, " -n ", traffic.messages,
      " -I -E ", wait, " -s ", traffic.message_bytes, " -O ", traffic.window, " -p ", port);
  const std::string command =
      absl::StrCat("(", settings, "timeout 5 ", test,
                   " >/dev/null 2>&1 &); for i in 1 2 3 4 5 6 7 8 9 10; do sleep 0.1; ", settings,
                   "timeout 5 ", test, " 127.0.0.1 2>/dev/null | tail -1 | grep . && break; done");
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

constexpr const char* kWaits[] = {"poll", "sleep"};

double ProcessSeconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

struct Pull {
  double seconds = 0;
  double first_layer_seconds = 0;
  double landed_seconds = 0;
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
  std::vector<double> landed;  // GB/s
  std::vector<double> verified;
  std::vector<double> same_size;
  std::vector<double> hot;
  std::vector<double> readv_cold;  // By cma only.
  std::vector<double> readv_hot;
  std::vector<double> first_layer;  // Its share of the time until all had landed.
  double cpu_seconds = 0;           // Of both ends.
};

// GB/s of one turn of pulls.
struct Turn {
  double landed = 0;
  double verified = 0;
};

Turn TakeTurn(PageTransport& transport, const LeasedPrefix& prefix, Rounds& rounds) {
  std::vector<double> landed;
  std::vector<double> verified;
  constexpr double kGigabytes = static_cast<double>(kPullBytes) / 1e9;
  for (int i = 0; i < kPullsATurn; ++i) {
    const Pull pull = PullOnce(transport, prefix);
    landed.push_back(kGigabytes / pull.landed_seconds);
    verified.push_back(kGigabytes / pull.seconds);
    rounds.first_layer.push_back(pull.first_layer_seconds / pull.landed_seconds);
  }
  return {Median(landed), Median(verified)};
}

void RunRound(const Case& of,
              testing::TransferProcess& daemon,
              PageTransport& transport,
              const LeasedPrefix& prefix,
              ForeignMemory& foreign,
              Rounds& rounds) {
  Turn best;
  double same_size = 0;
  double hot = 0;
  for (const char* wait : kWaits) {
    same_size = std::max(same_size, RunPerftest(of.transports, kSameSize, wait));
    const double before = daemon.CpuSeconds() + ProcessSeconds();
    const Turn turn = TakeTurn(transport, prefix, rounds);
    rounds.cpu_seconds += daemon.CpuSeconds() + ProcessSeconds() - before;
    best = {std::max(best.landed, turn.landed), std::max(best.verified, turn.verified)};
    hot = std::max(hot, RunPerftest(of.transports, kHot, wait));
  }
  rounds.landed.push_back(best.landed);
  rounds.verified.push_back(best.verified);
  rounds.same_size.push_back(same_size);
  rounds.hot.push_back(hot);
  if (UsesCma(of)) {
    rounds.readv_cold.push_back(foreign.ReadCold());
    rounds.readv_hot.push_back(foreign.ReadHot(kPageBytes));
  }
}

// Of each round's value to its limit; empty without ucx_perftest.
std::vector<double> Ratios(const std::vector<double>& values, const std::vector<double>& limits) {
  std::vector<double> ratios;
  for (size_t round = 0; round < values.size(); ++round) {
    if (limits[round] > 0) {
      ratios.push_back(values[round] / limits[round]);
    }
  }
  return ratios;
}

// A figure beside the limit that makes their quotient the median of the rounds'.
void RegisterRatio(const std::string& name,
                   const std::vector<double>& values,
                   const std::vector<double>& limits,
                   const char* limit_name,
                   double target) {
  const std::vector<double> ratios = Ratios(values, limits);
  const double value = Median(values);
  Figure figure;
  figure.value = value;
  figure.unit = "GB/s";
  if (!ratios.empty()) {
    const double ratio = Median(ratios);
    figure.limit = value / ratio;
    figure.limit_name = limit_name;
    if (target > 0) {
      figure.target = target * value / ratio;
    }
    absl::PrintF("%-32s %5.2f GB/s, %3.0f %% of %5.2f (rounds from %.0f to %.0f %%): %s\n", name,
                 value, 100 * ratio, value / ratio,
                 100 * *std::min_element(ratios.begin(), ratios.end()),
                 100 * *std::max_element(ratios.begin(), ratios.end()), limit_name);
  }
  Register(name, figure);
}

void Measure(const Case& of, ForeignMemory& foreign) {
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
    RunRound(of, daemon, **transport, prefix, foreign, rounds);
  }
  const std::string name = absl::StrCat("UcxPull/", of.name);
  constexpr const char* kSameSizeName =
      "ucx_perftest ucp_am_bw by rendezvous, same transports, messages of the pull's size, in "
      "turns";
  RegisterRatio(name, rounds.landed, rounds.same_size, kSameSizeName, 0.85);
  RegisterRatio(absl::StrCat(name, "/verified"), rounds.verified, rounds.same_size, kSameSizeName,
                0);
  RegisterRatio(absl::StrCat(name, "/beside_hot"), rounds.landed, rounds.hot,
                "ucx_perftest of a page's size, sending one buffer from the cache", 0);
  if (UsesCma(of)) {
    RegisterRatio(absl::StrCat(name, "/beside_readv"), rounds.landed, rounds.readv_cold,
                  "process_vm_readv of as much memory, none of it in the cache", 0);
    absl::PrintF("%-32s process_vm_readv of a page from the cache: %.2f GB/s\n", name,
                 Median(rounds.readv_hot));
  }
  absl::PrintF(
      "%-32s layer 0 after %.0f %% of landing, both ends %.2f CPU s/GB\n", name,
      100 * Median(rounds.first_layer),
      rounds.cpu_seconds * 1e9 / (kRounds * std::size(kWaits) * kPullsATurn * double{kPullBytes}));
  std::fflush(stdout);
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
  crumb::bench::ForeignMemory foreign(crumb::bench::kPullBytes);
  for (const crumb::bench::Case& of : {
           crumb::bench::Case{"cma/contiguous", "cma,tcp", false},
           crumb::bench::Case{"cma/scattered", "cma,tcp", true},
           crumb::bench::Case{"tcp/contiguous", "tcp", false},
           crumb::bench::Case{"tcp/scattered", "tcp", true},
       }) {
    // Others would be measured in vain.
    if (std::regex_search(absl::StrCat("UcxPull/", of.name),
                          std::regex(benchmark::GetBenchmarkFilter()))) {
      crumb::bench::Measure(of, foreign);
    }
  }
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
