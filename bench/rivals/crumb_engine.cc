// SPDX-License-Identifier: Apache-2.0
//
// The measuring side of crumb_store.py: an engine with an 8B model's geometry that publishes a
// prefix to a running crumbd and reads it back. Measures what measure.py measures, and prints the
// same records, one JSON object a line.
//
//   crumb_engine ADDRESS PLANE DAEMON_PID PAGES REPEAT CALLS      PLANE: map or ucx
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "grpcpp/grpcpp.h"

#include "crumb/client.h"
#include "crumb/sequence.h"
#include "proto/crumb/v1/cache.grpc.pb.h"
#include "proto/page/namespace_id.h"
#include "tests/support/test_profile.h"

namespace crumb::bench {
namespace {

constexpr Geometry kGeometry{.num_layers = 36, .num_kv_heads = 8, .key_dim = 128, .value_dim = 128};
constexpr Windows kWindows{.sink_tokens = 64, .recent_tokens = 256};
constexpr uint32_t kChunkTokens = 512;
constexpr size_t kQuestionTokens = 32;
// Puts before the timed ones: until the arena is full and each put also evicts.
constexpr int kWarmUpPuts = 4;

struct Arguments {
  std::string address;
  DataPlane plane = DataPlane::kMap;
  int daemon_pid = 0;
  uint32_t pages = 0;
  int repeat = 0;
  int calls = 0;
};

[[noreturn]] void Fail(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(1);
}

void Check(const absl::Status& status, const char* what) {
  if (!status.ok()) {
    Fail(absl::StrCat(what, ": ", status.ToString()));
  }
}

template <typename T>
T Take(absl::StatusOr<T> result, const char* what) {
  Check(result.status(), what);
  return *std::move(result);
}

double Seconds(const std::function<void()>& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// `bytes` is what one call moves; 0 where no page bytes move.
void PrintTimes(const char* op, std::vector<double> seconds, size_t bytes = 0) {
  std::sort(seconds.begin(), seconds.end());
  const size_t last = seconds.size() - 1;
  std::printf(
      "{\"op\": \"%s\", \"samples\": %zu, \"seconds\": %.9f, \"seconds_min\": %.9f, "
      "\"seconds_p99\": %.9f, \"bytes\": %zu}\n",
      op, seconds.size(), seconds[last / 2], seconds[0], seconds[(99 * last + 50) / 100], bytes);
  std::fflush(stdout);
}

// Resident memory of the daemon without this process's staging memory, which it maps to read.
size_t HeldBytes(int daemon_pid) {
  std::ifstream maps(absl::StrCat("/proc/", daemon_pid, "/smaps"));
  std::string line;
  bool counted = true;
  size_t total = 0;
  while (std::getline(maps, line)) {
    if (line.starts_with("Rss:")) {
      total += counted ? std::strtoull(line.c_str() + 4, nullptr, 10) * 1024 : 0;
    } else if (line.find('-') < line.find(' ')) {
      counted = line.find("crumb-staging") == std::string::npos;
    }
  }
  if (total == 0) {
    Fail(absl::StrCat("nothing to read in /proc/", daemon_pid, "/smaps"));
  }
  return total;
}

// A prefix is the same pages under other tokens.
std::vector<uint32_t> TokensOf(uint32_t prefix, uint32_t pages) {
  std::vector<uint32_t> tokens(size_t{pages} * kPageTokens);
  for (size_t i = 0; i < tokens.size(); ++i) {
    tokens[i] = prefix * 1'000'003U + static_cast<uint32_t>(i) % 32'000U;
  }
  return tokens;
}

// Prefills random keys and values, as an engine would, and keeps the last window in BF16.
std::unique_ptr<Sequence> MakeSequence(std::shared_ptr<const Profile> profile, uint32_t pages) {
  const uint32_t tokens = pages * kPageTokens;
  std::unique_ptr<Sequence> sequence = Take(
      Sequence::Create({.profile = std::move(profile), .num_query_heads = 32, .num_threads = 2}),
      "sequence");
  Check(sequence->RetainTail(tokens), "retain tail");
  const size_t row_floats = size_t{kGeometry.num_kv_heads} * kGeometry.key_dim;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> pool(2 * kChunkTokens * row_floats);
  std::generate(pool.begin(), pool.end(), [&] { return normal(random); });
  for (uint32_t done = 0; done < tokens;) {
    const uint32_t count = std::min(kChunkTokens, tokens - done);
    const size_t floats = count * row_floats;
    Check(sequence->BeginChunk(count), "begin chunk");
    for (uint32_t layer = 0; layer < kGeometry.num_layers; ++layer) {
      const auto rows = [&] { return std::span(pool).subspan(random() % (floats + 1), floats); };
      Check(sequence->Append(layer, rows(), rows()), "append");
    }
    Check(sequence->EndChunk(), "end chunk");
    done += count;
  }
  return sequence;
}

class Engine {
 public:
  explicit Engine(const Arguments& arguments)
      : arguments_(arguments),
        profile_(MakeTestProfile(
            {.geometry = kGeometry, .windows = kWindows, .rotation_per_layer = true})),
        sequence_(MakeSequence(profile_, arguments.pages)),
        stub_(v1::Cache::NewStub(
            grpc::CreateChannel(arguments.address, grpc::InsecureChannelCredentials()))) {
    client_ = Take(Client::Create({.address = arguments.address,
                                   .client_name = "bench",
                                   .profile = profile_,
                                   .data_plane = arguments.plane,
                                   // As the rivals: they check nothing unless asked to.
                                   .verify_mapped_pages = false}),
                   "client");
    Check(client_->WaitAttached(absl::Seconds(30)), "attach to crumbd");
  }

  void Run() {
    const size_t empty = HeldBytes(arguments_.daemon_pid);
    const size_t stored = Put(0);
    std::printf("{\"op\": \"memory\", \"held_bytes\": %zu, \"stored_bytes\": %zu}\n",
                HeldBytes(arguments_.daemon_pid) - empty, stored);
    MeasureGet();
    MeasureExists("exists", 0, arguments_.pages);
    MeasureExists("exists_absent", 1 << 10, 0);
    if (arguments_.plane == DataPlane::kMap) {
      MeasureAttach();
    }
    // Last, because new prefixes push old ones out.
    MeasurePut();
  }

 private:
  // Bytes handed over.
  size_t Put(uint32_t prefix) {
    const PublishResult result =
        Take(client_->Publish(*sequence_, TokensOf(prefix, arguments_.pages), {}), "publish");
    if (result.pages_added != arguments_.pages) {
      Fail(absl::StrCat("publish added ", result.pages_added, " pages, not ", arguments_.pages));
    }
    return result.bytes_sent;
  }

  std::shared_ptr<PrefixHandle> Lookup(const std::vector<uint32_t>& prompt) {
    // shared: as the library hands it out.
    std::shared_ptr<PrefixHandle> handle = Take(client_->Lookup(prompt, {}), "lookup");
    if (handle->num_pages() != arguments_.pages) {
      Fail(absl::StrCat("lookup found ", handle->num_pages(), " usable pages of ",
                        arguments_.pages));
    }
    return handle;
  }

  // Prefix 0 and a question after it: shorter than the recent window, so that the tail is needed.
  std::vector<uint32_t> Prompt() const {
    std::vector<uint32_t> tokens = TokensOf(0, arguments_.pages);
    tokens.resize(tokens.size() + kQuestionTokens, 7);
    return tokens;
  }

  // Copies every page that is there, and returns the bytes.
  size_t CopyOut(PrefixHandle& handle, std::span<std::byte> target) {
    size_t copied = 0;
    for (uint32_t page = 0; page < arguments_.pages; ++page) {
      for (const PageEncoding encoding : {PageEncoding::kInt2, PageEncoding::kBf16}) {
        if (handle.HeadBlock(PageIdx(page), encoding, 0, 0) != nullptr) {
          const size_t bytes = kGeometry.PageBytes(encoding);
          Check(handle.CopyPage(PageIdx(page), encoding, target.subspan(copied, bytes)), "copy");
          copied += bytes;
        }
      }
    }
    return copied;
  }

  // Compares the bytes as CopyOut left them with what the sequence holds.
  void CompareCopy(const PrefixHandle& handle, const std::byte* copy) {
    std::vector<std::byte> image;
    for (uint32_t page = 0; page < arguments_.pages; ++page) {
      for (const PageEncoding encoding : {PageEncoding::kInt2, PageEncoding::kBf16}) {
        if (handle.HeadBlock(PageIdx(page), encoding, 0, 0) == nullptr) {
          continue;
        }
        image.resize(kGeometry.PageBytes(encoding));
        if (sequence_->HasPage(PageIdx(page), encoding)) {
          Check(sequence_->ExportPage(PageIdx(page), encoding, image), "export");
          if (std::memcmp(copy, image.data(), image.size()) != 0) {
            Fail(absl::StrCat("page ", page, " came back with other bytes than were put"));
          }
        }  // Otherwise the daemon made this encoding, from the other.
        copy += image.size();
      }
    }
  }

  // One get, from tokens to bytes of ours; returns the bytes.
  size_t Get(const std::vector<uint32_t>& prompt, std::span<std::byte> target, double* seconds) {
    std::shared_ptr<PrefixHandle> handle;  // shared: as the library hands it out.
    size_t copied = 0;
    *seconds = Seconds([&] {
      handle = Lookup(prompt);
      Check(handle->WaitForLayer(kGeometry.num_layers - 1), "wait for the last layer");
      copied =
          arguments_.plane == DataPlane::kMap ? CopyOut(*handle, target) : handle->copied_bytes();
      Check(handle->Validate(), "validate");
    });
    if (arguments_.plane != DataPlane::kMap) {
      CopyOut(*handle, target);  // For the comparison; a pull has copied already.
    }
    CompareCopy(*handle, target.data());
    return copied;
  }

  void MeasureGet() {
    const std::vector<uint32_t> prompt = Prompt();
    std::vector<std::byte> target(size_t{arguments_.pages} *
                                      (kGeometry.PageBytes(PageEncoding::kInt2)) +
                                  8 * kGeometry.PageBytes(PageEncoding::kBf16));
    std::vector<double> times(static_cast<size_t>(arguments_.repeat));
    double cold = 0;
    size_t bytes = Get(prompt, target, &cold);
    for (double& seconds : times) {
      bytes = Get(prompt, target, &seconds);
    }
    PrintTimes("get", times, bytes);
  }

  void MeasureAttach() {
    const std::vector<uint32_t> prompt = Prompt();
    std::vector<double> attaches;
    std::vector<double> releases;
    for (int call = 0; call <= arguments_.calls; ++call) {
      std::shared_ptr<PrefixHandle> handle;  // shared: as the library hands it out.
      const double attach = Seconds([&] { handle = Lookup(prompt); });
      if (handle->copied_bytes() != 0) {
        Fail("an attach by map copied bytes");
      }
      const double release = Seconds([&] { handle.reset(); });
      if (call > 0) {  // The first maps the chunks, which all that follow share.
        attaches.push_back(attach);
        releases.push_back(release);
      }
    }
    PrintTimes("attach", attaches);
    PrintTimes("release", releases);
  }

  void MeasureExists(const char* op, uint32_t prefix, uint32_t expected_pages) {
    v1::ProbeRequest request;
    const NamespaceId space = ComputeNamespaceId("default", profile_->id(), "");
    request.set_namespace_id(space.bytes.data(), space.bytes.size());
    const std::vector<uint32_t> tokens = TokensOf(prefix, arguments_.pages);
    std::vector<double> times;
    for (int call = 0; call < arguments_.calls; ++call) {
      v1::ProbeReply reply;
      grpc::Status status;
      times.push_back(Seconds([&] {
        grpc::ClientContext context;
        request.set_tokens(tokens.data(), tokens.size() * sizeof(tokens[0]));
        status = stub_->Probe(&context, request, &reply);
      }));
      if (!status.ok() || reply.matched_tokens() != expected_pages * kPageTokens) {
        Fail(absl::StrCat(op, ": ", reply.matched_tokens(), " tokens found; ",
                          status.error_message()));
      }
    }
    PrintTimes(op, times);
  }

  void MeasurePut() {
    std::vector<double> times;
    size_t bytes = 0;
    for (int put = 1; put <= kWarmUpPuts + arguments_.repeat; ++put) {
      const double seconds = Seconds([&] { bytes = Put(static_cast<uint32_t>(put)); });
      if (put > kWarmUpPuts) {
        times.push_back(seconds);
      }
    }
    PrintTimes("put", times, bytes);
  }

  const Arguments arguments_;
  const std::shared_ptr<const Profile> profile_;  // shared: with sequence and client.
  const std::unique_ptr<Sequence> sequence_;
  const std::unique_ptr<v1::Cache::Stub> stub_;
  std::unique_ptr<Client> client_;
};

Arguments ParseArguments(int argc, char** argv) {
  Arguments arguments;
  if (argc == 7) {
    arguments.address = argv[1];
    arguments.plane = std::string(argv[2]) == "ucx" ? DataPlane::kUcx : DataPlane::kMap;
    if (absl::SimpleAtoi(argv[3], &arguments.daemon_pid) &&
        absl::SimpleAtoi(argv[4], &arguments.pages) &&
        absl::SimpleAtoi(argv[5], &arguments.repeat) &&
        absl::SimpleAtoi(argv[6], &arguments.calls) && arguments.pages >= 8 &&
        arguments.repeat > 0 && arguments.calls > 0) {
      return arguments;
    }
  }
  Fail("usage: crumb_engine ADDRESS map|ucx DAEMON_PID PAGES REPEAT CALLS, PAGES at least 8");
}

}  // namespace
}  // namespace crumb::bench

int main(int argc, char** argv) {
  crumb::bench::Engine(crumb::bench::ParseArguments(argc, argv)).Run();
}
