// SPDX-License-Identifier: Apache-2.0
//
// Publishes of an 8B model's pages (36 layers, 8 KV heads, head_dim 128) by Client::Publish into a
// real crumbd, by map and over UCX: as engines hand them over that demote themselves (INT2 but for
// the sink and the tail), and in BF16 altogether, demoted by the daemon. Into memory that the
// daemon has yet to take from the system, and into a full arena, where each publish pushes out an
// older prefix. Wall clock, medians, the ways in turns; beside it what the daemon's time went to,
// and what memory costs here that was not touched before.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "bench/support/figure.h"
#include "bench/support/must.h"
#include "bench/support/thread_clock.h"
#include "crumb/client.h"
#include "crumb/cuda/demote.h"
#include "crumb/sequence.h"
#include "proto/base/check.h"
#include "proto/base/clock.h"
#include "proto/base/huge_page.h"
#include "proto/base/unique_fd.h"
#include "tests/support/daemon_process.h"
#include "tests/support/test_profile.h"

namespace crumb::bench {
namespace {

constexpr Geometry kGeometry{.num_layers = 36, .num_kv_heads = 8, .key_dim = 128, .value_dim = 128};
constexpr uint32_t kChunkTokens = 512;
constexpr int kFreshRounds = 4;
constexpr int kFullRounds = 7;
constexpr int kFillingPublishes = 16;  // More than the 2 GiB of the arena take.

double Median(std::vector<double> values) {
  CRUMB_CHECK(!values.empty(), "something was measured");
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// What a process has used so far.
struct Usage {
  double user_seconds = 0;
  double system_seconds = 0;
  double faults = 0;
  double resident_bytes = 0;
};

Usage UsageOf(pid_t pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/stat"));
  std::string text;
  std::getline(file, text);
  std::istringstream fields(text.substr(text.rfind(')') + 1));  // From field 3 on.
  std::vector<std::string> values;
  for (std::string value; fields >> value;) {
    values.push_back(std::move(value));
  }
  const auto tick = static_cast<double>(sysconf(_SC_CLK_TCK));
  const auto page = static_cast<double>(sysconf(_SC_PAGESIZE));
  return {std::stod(values[11]) / tick, std::stod(values[12]) / tick, std::stod(values[7]),
          std::stod(values[21]) * page};
}

struct Case {
  const char* name;
  uint32_t pages;
  uint32_t recent_pages;  // In BF16 at both ends.
};

// Prefills random keys and values, as an engine would.
std::unique_ptr<Sequence> MakeSequence(const std::shared_ptr<const Profile>& profile,
                                       uint32_t tokens) {
  auto sequence =
      Must(Sequence::Create({.profile = profile, .num_query_heads = 8, .num_threads = 2}));
  Must(sequence->RetainTail(tokens));
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> pool(size_t{2} * kChunkTokens * kGeometry.num_kv_heads * kGeometry.key_dim);
  std::generate(pool.begin(), pool.end(), [&] { return normal(random); });
  for (uint32_t done = 0; done < tokens;) {
    const uint32_t count = std::min(kChunkTokens, tokens - done);
    const size_t floats = size_t{count} * kGeometry.num_kv_heads * kGeometry.key_dim;
    Must(sequence->BeginChunk(count));
    for (uint32_t layer = 0; layer < kGeometry.num_layers; ++layer) {
      const auto rows = [&] { return std::span(pool).subspan(random() % (floats + 1), floats); };
      Must(sequence->Append(layer, rows(), rows()));
    }
    Must(sequence->EndChunk());
    done += count;
  }
  return sequence;
}

// One engine at one daemon of its own.
class Way {
 public:
  Way(const char* name, DataPlane plane, const std::shared_ptr<const Profile>& profile)
      : name_(name),
        daemon_(
            Must(DaemonProcess::Start({.flags = {"--ucx.enabled=true", "--store.capacity=2GiB"}}))),
        client_(Must(Client::Create({.address = daemon_->address(),
                                     .client_name = "publish_bench",
                                     .profile = profile,
                                     .data_plane = plane}))) {
    Must(client_->WaitAttached(absl::Seconds(30)));
  }

  // Bytes handed over.
  size_t Publish(const Sequence& sequence, uint32_t tokens) {
    ++prefix_;
    std::vector<uint32_t> ids(tokens);
    for (uint32_t i = 0; i < tokens; ++i) {
      ids[i] = prefix_ * 1'000'003u + i % 32'000u;
    }
    const Usage before = UsageOf(daemon_->pid());
    const absl::Time start = Clock::System().Now();
    const PublishResult result = Must(client_->Publish(sequence, ids, {}));
    const double seconds = absl::ToDoubleSeconds(Clock::System().Now() - start);
    CRUMB_CHECK(result.pages_added == tokens / kPageTokens, "all pages are new");
    const Usage after = UsageOf(daemon_->pid());
    seconds_.push_back(seconds);
    user_.push_back(after.user_seconds - before.user_seconds);
    system_.push_back(after.system_seconds - before.system_seconds);
    faults_.push_back(after.faults - before.faults);
    return result.bytes_sent;
  }
  void Clear() {
    for (auto* values : {&seconds_, &user_, &system_, &faults_}) {
      values->clear();
    }
  }
  void Print(const char* what, const char* memory, size_t bytes) const {
    absl::PrintF(
        "%-5s %-4s %-6s %6.1f MB  %6.1f ms  %5.2f GB/s  daemon: %5.0f ms user %5.0f ms system  "
        "%6.0f faults\n",
        what, name_, memory, static_cast<double>(bytes) / 1e6, 1e3 * Median(seconds_), Rate(bytes),
        1e3 * Median(user_), 1e3 * Median(system_), Median(faults_));
    std::fflush(stdout);
  }
  double Rate(size_t bytes) const { return static_cast<double>(bytes) / Median(seconds_) / 1e9; }
  const char* name() const { return name_; }
  double resident_bytes() const { return UsageOf(daemon_->pid()).resident_bytes; }

 private:
  const char* const name_;
  const std::unique_ptr<DaemonProcess> daemon_;
  const std::unique_ptr<Client> client_;
  uint32_t prefix_ = 0;
  std::vector<double> seconds_;
  std::vector<double> user_;
  std::vector<double> system_;
  std::vector<double> faults_;
};

// GB/s of BF16 that one core demotes.
double DemoteRate(const Profile& profile, const Sequence& sequence) {
  std::vector<std::byte> bf16(kGeometry.PageBytes(PageEncoding::kBf16));
  std::vector<std::byte> int2(kGeometry.PageBytes(PageEncoding::kInt2));
  Must(sequence.ExportPage(PageIdx(0), PageEncoding::kBf16, bf16));
  std::vector<double> rates;
  for (int round = 0; round < 5; ++round) {
    const double start = ThreadSeconds();
    Must(DemotePage(profile, {0, kGeometry.num_kv_heads}, 0, bf16, int2));
    rates.push_back(static_cast<double>(bf16.size()) / (ThreadSeconds() - start) / 1e9);
  }
  return Median(rates);
}

double CopyRate(size_t bytes) {
  std::vector<std::byte> source(bytes, std::byte{1});
  std::vector<std::byte> target(bytes);
  std::vector<double> rates;
  for (int round = 0; round < 5; ++round) {
    const double start = ThreadSeconds();
    std::memcpy(target.data(), source.data(), bytes);
    benchmark::DoNotOptimize(target.data());
    rates.push_back(static_cast<double>(bytes) / (ThreadSeconds() - start) / 1e9);
  }
  return Median(rates);
}

// Shared memory that is kept, so that the daemons do not get it as memory that was touched before.
class FreshMemfd {
 public:
  explicit FreshMemfd(size_t bytes) : memfd_(::memfd_create("fresh", MFD_CLOEXEC)) {
    CRUMB_CHECK(::ftruncate(memfd_.get(), static_cast<off_t>(bytes)) == 0, "a memfd");
    void* const memory = MapAtHugePage(memfd_.get(), bytes, PROT_READ | PROT_WRITE);
    CRUMB_CHECK(memory != MAP_FAILED, "a mapping");
    bytes_ = {static_cast<std::byte*>(memory), bytes};
    const absl::Time start = Clock::System().Now();
    AskForHugePages(bytes_, bytes_);
    seconds_ = absl::ToDoubleSeconds(Clock::System().Now() - start);
  }
  ~FreshMemfd() { ::munmap(bytes_.data(), bytes_.size()); }
  FreshMemfd(const FreshMemfd&) = delete;
  FreshMemfd& operator=(const FreshMemfd&) = delete;
  double seconds() const { return seconds_; }

 private:
  const UniqueFd memfd_;
  std::span<std::byte> bytes_;
  double seconds_ = 0;  // For the system to give it, one thread.
};

void Measure(const Case& of) {
  const auto profile = MakeTestProfile(
      {.geometry = kGeometry,
       .windows = {.sink_tokens = kPageTokens, .recent_tokens = of.recent_pages * kPageTokens},
       .rotation_per_layer = true});
  const uint32_t tokens = of.pages * kPageTokens;
  const auto sequence = MakeSequence(profile, tokens);
  Way ways[] = {{"map", DataPlane::kMap, profile}, {"ucx", DataPlane::kUcx, profile}};
  const bool is_bf16 = of.recent_pages + 1 >= of.pages;
  size_t bytes = 0;
  const auto run = [&](const char* memory, int rounds) {
    for (int round = 0; round < rounds; ++round) {
      for (Way& way : ways) {
        bytes = way.Publish(*sequence, tokens);
      }
    }
    const double limit = is_bf16 ? DemoteRate(*profile, *sequence) : CopyRate(bytes);
    for (Way& way : ways) {
      way.Print(of.name, memory, bytes);
      Register(absl::StrCat("Publish/", of.name, "/", way.name(), "/", memory),
               {.value = way.Rate(bytes),
                .limit = limit,
                .unit = "GB/s",
                .limit_name = is_bf16 ? "demotion of the same pages on one core"
                                      : "memcpy of the same bytes"});
      way.Clear();
    }
  };
  for (Way& way : ways) {
    const double before = way.resident_bytes();
    bytes = way.Publish(*sequence, tokens);
    const double held = way.resident_bytes() - before;
    // By map that includes the engine's staging memory, which the daemon has mapped.
    absl::PrintF("%-5s %-4s the first publish: the daemon holds %.1f MB more\n", of.name,
                 way.name(), held / 1e6);
    way.Clear();
  }
  std::vector<std::unique_ptr<FreshMemfd>> touched;
  std::vector<double> touching;
  const auto touch = [&] {
    touched.push_back(std::make_unique<FreshMemfd>(bytes));
    touching.push_back(touched.back()->seconds());
  };
  touch();
  run("fresh", kFreshRounds);
  touch();
  absl::PrintF("%-5s one thread has the system give as much new memory in %.1f and %.1f ms\n",
               of.name, 1e3 * touching[0], 1e3 * touching[1]);
  for (int publish = 0; publish < kFillingPublishes; ++publish) {
    for (Way& way : ways) {
      way.Publish(*sequence, tokens);
      way.Clear();
    }
  }
  run("full", kFullRounds);
}

}  // namespace
}  // namespace crumb::bench

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  for (const crumb::bench::Case& of : {
           crumb::bench::Case{"int2", 64, 4},
           crumb::bench::Case{"bf16", 20, 19},
       }) {
    crumb::bench::Measure(of);
  }
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
