// SPDX-License-Identifier: Apache-2.0
//
// Time to first token of a second engine. This process is the first: it publishes prompts of 8,192
// and 100,000 tokens of an 8B model, in BF16 from its GPU's memory, to a crumbd that demotes them
// on the same GPU. Engines of other processes then find them, by every way that there is; each
// takes the time from its lookup to the end of a decode step over all that was found. What the same
// prompts cost to compute, rivals.py estimates in the same run.
//
//   first_token_gpu_bench                      all of it
//   first_token_gpu_bench ADDRESS gpu|host|ucx  the engine
#include <spawn.h>
#include <sys/wait.h>

#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "bench/gpu/bf16_pages.h"
#include "bench/gpu/first_token_engine.h"
#include "bench/gpu/service_scene.h"
#include "tests/support/daemon_process.h"
#include "tests/support/test_profile.h"

extern char** environ;  // NOLINT(readability-identifier-naming): POSIX.

namespace crumb::bench {
namespace {

constexpr uint32_t kPrompts[] = {128, 1562};  // In pages: 8,192 and 99,968 tokens.
constexpr int kEngines = 4;                   // Clients of a process, one after the other.
// After which a client has its chunks registered.
constexpr absl::Duration kForAWhile = absl::Seconds(2);

// Of whole pages, and the token that is to be decoded.
std::vector<uint32_t> PromptOf(uint32_t num_pages) {
  std::vector<uint32_t> tokens = Prompt(num_pages, /*seed=*/num_pages);
  tokens.resize(size_t{num_pages} * kPageTokens + 1);
  return tokens;
}

std::shared_ptr<const Profile> ModelProfile() {
  return MakeTestProfile({.geometry = kGeometry, .rotation_per_layer = true});
}

struct Way {
  const char* argument;
  PagesFrom from;
  DataPlane data_plane;
  const char* words;
};
constexpr Way kWays[] = {
    {"gpu", PagesFrom::kGpu, DataPlane::kMap, "in place on the GPU"},
    {"host", PagesFrom::kHost, DataPlane::kMap, "from host memory"},
    {"ucx", PagesFrom::kUcx, DataPlane::kUcx, "pulled over UCX"},
};

std::unique_ptr<Client> Attach(const std::string& address,
                               const std::shared_ptr<const Profile>& profile,
                               DataPlane data_plane) {
  auto client = Must(
      Client::Create({.address = address, .profile = profile, .data_plane = data_plane, .gpu = 0}));
  Must(client->WaitAttached(absl::Seconds(30)));
  return client;
}

void RunEngine(const std::string& address, const Way& way) {
  const auto profile = ModelProfile();
  FirstTokenEngine engine(profile, way.from);
  for (const uint32_t num_pages : kPrompts) {
    const auto prompt = PromptOf(num_pages);
    Times at_once;
    Times first;
    Times later;
    size_t copied_bytes = 0;
    for (int i = 0; i < kEngines; ++i) {
      const auto client = Attach(address, profile, way.data_plane);
      const bool waits = i % 2 != 0 && way.from == PagesFrom::kHost;
      absl::SleepFor(waits ? kForAWhile : absl::ZeroDuration());
      (waits ? first : at_once).ms.push_back(engine.Run(client.get(), prompt).ms);
      for (int again = 0; again < 2; ++again) {
        const FirstTokenEngine::Times times = engine.Run(client.get(), prompt);
        later.ms.push_back(times.ms);
        copied_bytes = times.copied_bytes;
      }
    }
    const uint32_t tokens = num_pages * kPageTokens;
    const auto print = [&](const char* when, Times times) {
      if (!times.ms.empty()) {
        Print("first_token", absl::StrCat(tokens, " tokens ", way.words, when), std::move(times),
              copied_bytes, tokens);
      }
    };
    print(", just attached", std::move(at_once));
    print(", the engine's first", std::move(first));
    print("", std::move(later));
  }
}

// BF16 of the sink and the recent window, INT2 between them.
bool CanBeReadInPlace(const PrefixHandle& prefix, const Windows& windows) {
  const uint32_t sink = windows.sink_tokens / kPageTokens;
  const uint32_t recent = prefix.num_pages() - windows.recent_tokens / kPageTokens;
  for (uint32_t page = 0; page < prefix.num_pages(); ++page) {
    const auto encoding = page < sink || page >= recent ? PageEncoding::kBf16 : PageEncoding::kInt2;
    if (prefix.GpuPage(PageIdx(page), encoding) == nullptr) {
      return false;
    }
  }
  return true;
}

void Publish(Client* client, const Profile& profile) {
  const std::vector<std::byte> image = PageOfRows();
  for (const uint32_t num_pages : kPrompts) {
    const auto prompt = PromptOf(num_pages);
    const Bf16Pages pages(image, num_pages);
    Must(client->PublishFromGpu(pages, std::span(prompt).first(pages.length()),
                                {.timeout = absl::Seconds(60)}));
    const absl::Time published = Now();
    while (!CanBeReadInPlace(*Lookup(client, prompt), profile.windows())) {
      CRUMB_CHECK(Now() - published < absl::Seconds(30), "the daemon copies pages to the GPU");
    }
  }
}

void StartEngine(const std::string& address, const Way& way) {
  std::string program = "/proc/self/exe";
  std::string where = address;
  std::string how = way.argument;
  std::array<char*, 4> arguments = {program.data(), where.data(), how.data(), nullptr};
  pid_t pid = -1;
  const int error =
      ::posix_spawn(&pid, program.c_str(), nullptr, nullptr, arguments.data(), environ);
  CRUMB_CHECK(error == 0, "an engine starts");
  int status = 0;
  CRUMB_CHECK(::waitpid(pid, &status, 0) == pid && status == 0, "the engine ends well");
}

void Run() {
  Check(cudaFree(nullptr));
  const auto profile = ModelProfile();
  const auto daemon = Must(DaemonProcess::Start(
      {.flags = {"--store.capacity=16GiB", "--store.gpu_arena=4GiB", "--store.gpu_chunk=128MiB",
                 "--demote.threads=8", "--ucx.enabled=true"}}));
  const auto client = NewClient(daemon->address(), profile);
  Publish(client.get(), *profile);
  for (const Way& way : kWays) {
    StartEngine(daemon->address(), way);
  }
}

}  // namespace
}  // namespace crumb::bench

int main(int argc, char** argv) {
  if (argc == 1) {
    crumb::bench::Run();
    return 0;
  }
  for (const auto& way : crumb::bench::kWays) {
    if (argc == 3 && std::strcmp(argv[2], way.argument) == 0) {
      crumb::bench::RunEngine(argv[1], way);
      return 0;
    }
  }
  return 2;
}
