// SPDX-License-Identifier: Apache-2.0
//
// The part of a daemon that the UCX data plane needs: a store, sessions and the UCX server, driven
// by lines on standard input, one answer a line. Tests and benchmarks run it as another process, so
// that it can be stopped and killed. Arguments are name=value; see Flags.
//
//   session                     -> session ID SECRET
//   publish SALT PAGES          -> published PAGES
//   lookup SESSION SALT PAGES   -> lease ID PAGES {int2 generation or -, bf16 generation or -}...
//   renew|release SESSION LEASE -> ok
//   end SESSION                 -> ok
//   evict                       -> ok: everything that is not held
//   corrupt SALT PAGE           -> ok: one byte of the page's memory is flipped
//   staged SESSION PUBLISH      -> staged BYTES CRC | refused WHY
//   unstage SESSION PUBLISH     -> ok
//   stats                       -> stats PULLS PEERS REFUSED HELD_PAGES STAGING_BYTES SENT_BYTES
//                                      PULLED PUSHED
//   quit
#include <sys/prctl.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <thread>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"

#include "daemon/store/page_store.h"
#include "daemon/tier/populate.h"
#include "daemon/transfer/session_table.h"
#include "daemon/transfer/ucx_server.h"
#include "proto/base/check.h"
#include "proto/base/crc32c.h"
#include "tests/support/transfer_pages.h"

namespace crumb::testing {
namespace {

using Flags = std::map<std::string, std::string>;

const Flags kDefaults = {
    {"transports", "cma,tcp"},
    {"layers", "4"},
    {"heads", "2"},
    {"dim", "64"},
    {"sink_pages", "1"},
    {"lease_ms", "30000"},
    {"quarantine_ms", "0"},
    {"capacity_mb", "256"},
    {"stall_ms", "10000"},
    {"window", "16"},
    {"chunk_bytes", "1048576"},
    {"num_chunks", "64"},
    {"hello_timeout_ms", "10000"},
    {"staging_mb", "4096"},
};

template <typename T>
T Must(absl::StatusOr<T> value) {
  CRUMB_CHECK(value.ok(), std::string(value.status().message()).c_str());
  return *std::move(value);
}

class Counter final : public TransferObserver {
 public:
  void OnPulled(uint64_t, absl::Duration) override { ++pulled; }
  void OnPushed(uint64_t, absl::Duration) override { ++pushed; }
  std::atomic<uint64_t> pulled{0};
  std::atomic<uint64_t> pushed{0};
};

class Daemon {
 public:
  explicit Daemon(Flags flags) : flags_(std::move(flags)) {
    geometry_ = {Number("layers"), Number("heads"), Number("dim"), Number("dim")};
    profile_ = MakeTransferProfile(geometry_, Number("sink_pages"));
    StoreOptions store;
    store.capacity_bytes = size_t{Number("capacity_mb")} << 20;
    store.lease = absl::Milliseconds(Number("lease_ms"));
    store.lease_grace = absl::ZeroDuration();
    store.quarantine = absl::Milliseconds(Number("quarantine_ms"));
    store_ = Must(PageStore::Create(store, Clock::System()));
    UcxServerOptions options;
    options.ucx.transports = flags_["transports"];
    options.ucx.stall_timeout = absl::Milliseconds(Number("stall_ms"));
    options.ucx.log = [](std::string_view text) { std::cerr << text << "\n"; };
    options.pulls.window = Number("window");
    options.pulls.chunk_bytes = Number("chunk_bytes");
    options.pulls.num_chunks = Number("num_chunks");
    options.staging.max_bytes = size_t{Number("staging_mb")} << 20;
    options.hello_timeout = absl::Milliseconds(Number("hello_timeout_ms"));
    server_ = Must(UcxServer::Create(options, *store_, sessions_, observer_));
    publisher_ = OpenSession();
    ticker_ = std::thread([this] {
      while (!ended_.WaitForNotificationWithTimeout(absl::Milliseconds(20))) {
        store_->Tick();
      }
    });
  }
  ~Daemon() {
    ended_.Notify();
    ticker_.join();
    server_.reset();
  }

  void Serve() {
    std::cout << "ready " << server_->endpoint().port << " " << server_->endpoint().version
              << std::endl;
    for (std::string line; std::getline(std::cin, line) && line != "quit";) {
      std::istringstream words(line);
      std::cout << Answer(words) << std::endl;
    }
  }

 private:
  uint32_t Number(const std::string& name) const {
    return static_cast<uint32_t>(std::stoul(flags_.at(name)));
  }

  SessionId OpenSession() {
    return Must(store_->OpenSession({.client_name = "test",
                                     .pid = 1,
                                     .tenant = "default",
                                     .profile = {profile_->id(), geometry_, profile_->windows()},
                                     .heads = {}}));
  }

  std::string Answer(std::istringstream& words) {
    std::string command;
    uint64_t a = 0;
    uint32_t b = 0;
    uint32_t c = 0;
    words >> command >> a >> b >> c;
    if (command == "session") {
      return Session();
    }
    if (command == "publish") {
      return Publish(static_cast<uint32_t>(a), b);
    }
    if (command == "lookup") {
      return Lookup(SessionId(a), b, c);
    }
    if (command == "corrupt") {
      return Corrupt(static_cast<uint32_t>(a), b);
    }
    if (command == "staged") {
      return Staged(SessionId(a), PublishId(b));
    }
    if (command == "unstage") {
      server_->DropStaging(SessionId(a), PublishId(b));
      return "ok";
    }
    if (command == "stats") {
      const UcxServerStats& stats = server_->stats();
      return absl::StrCat("stats ", stats.pulls.load(), " ", stats.peers.load(), " ",
                          stats.refused.load(), " ", store_->Status().leased_pages, " ",
                          server_->staging_bytes(), " ", stats.sent_bytes.load(), " ",
                          observer_.pulled.load(), " ", observer_.pushed.load());
    }
    const LeaseId leases[] = {LeaseId(b)};
    if (command == "renew") {
      return Must(store_->RenewLeases(SessionId(a), leases)).empty() ? "ok" : "over";
    }
    if (command == "release") {
      return std::string(store_->ReleaseLeases(SessionId(a), leases).ok() ? "ok" : "over");
    }
    if (command == "end") {
      store_->EndSession(SessionId(a));
      sessions_.Remove(SessionId(a));
      return "ok";
    }
    CRUMB_CHECK(command == "evict", command.c_str());
    for (const NamespaceStatus& of : store_->Status().namespaces) {
      Must(store_->Evict(of.id, {}));
    }
    return "ok";
  }

  std::string Session() {
    const SessionId id = OpenSession();
    const SessionSecret secret = MakeSessionSecret();
    sessions_.Add(id, secret);
    return absl::StrCat("session ", id.value(), " ",
                        absl::BytesToHexString(absl::string_view(
                            reinterpret_cast<const char*>(secret.data()), secret.size())));
  }

  std::string Publish(uint32_t salt, uint32_t pages) {
    const std::vector<uint32_t> tokens = MakeTokens(salt, pages * kPageTokens);
    const PublishPlan plan = Must(store_->BeginPublish(publisher_, "", tokens));
    std::vector<WrittenBlock> written;
    {
      const WriteGuard guard = Must(store_->BeginWrite(publisher_, plan.id));
      for (const WritableBlock& block : guard.blocks()) {
        CRUMB_CHECK(Populate(block.fresh, block.bytes).ok(), "memory for a page");
        FillPage(block.bytes, geometry_, salt, block.key.page.value(), block.key.encoding);
        const auto checksums =
            HeadChecksums(geometry_, block.key.encoding, ~uint64_t{0}, block.bytes);
        written.push_back({block.key.page,
                           block.key.encoding,
                           {checksums.begin(), checksums.begin() + geometry_.num_kv_heads}});
      }
    }
    Must(store_->CommitPublish(publisher_, plan.id, written));
    return absl::StrCat("published ", pages);
  }

  LookupResult Find(SessionId session, uint32_t salt, uint32_t pages) {
    // One token more than the prefix: a prompt must leave something to compute.
    std::vector<uint32_t> prompt = MakeTokens(salt, pages * kPageTokens);
    prompt.push_back(1);
    return Must(store_->Lookup(session, "", prompt, /*allow_int2_window=*/true));
  }

  std::string Lookup(SessionId session, uint32_t salt, uint32_t pages) {
    const LookupResult found = Find(session, salt, pages);
    std::string answer = absl::StrCat("lease ", found.lease.value(), " ", found.pages.size());
    const auto generation = [](const std::optional<BlockRef>& block) {
      return block.has_value() ? absl::StrCat(block->generation.value()) : std::string("-");
    };
    for (const PageRef& page : found.pages) {
      absl::StrAppend(&answer, " ", generation(page.int2), " ", generation(page.bf16));
    }
    return answer;
  }

  std::string Corrupt(uint32_t salt, uint32_t page) {
    const LookupResult found = Find(publisher_, salt, page + 1);
    const PageKey key{PageIdx(page), found.pages[page].int2.has_value() ? PageEncoding::kInt2
                                                                        : PageEncoding::kBf16};
    const ReadGuard guard = Must(store_->BeginRead(publisher_, found.lease, std::span(&key, 1)));
    // The daemon's own mapping is writable; nothing but a test goes around the store.
    const std::span<const std::byte> bytes = guard.pages()[0].bytes;
    const_cast<std::byte&>(bytes[bytes.size() / 2]) ^= std::byte{1};
    const LeaseId leases[] = {found.lease};
    CRUMB_CHECK(store_->ReleaseLeases(publisher_, leases).ok(), "release");
    return "ok";
  }

  std::string Staged(SessionId session, PublishId publish) {
    const auto staging = server_->Staging(session, publish);
    if (!staging.ok()) {
      return absl::StrCat("refused ", staging.status().message());
    }
    return absl::StrCat("staged ", (*staging)->bytes().size(), " ", Crc32c((*staging)->bytes()));
  }

  Flags flags_;
  Geometry geometry_;
  std::shared_ptr<const Profile> profile_;
  SessionTable sessions_;
  Counter observer_;
  std::unique_ptr<PageStore> store_;
  std::unique_ptr<UcxServer> server_;
  SessionId publisher_;
  absl::Notification ended_;
  std::thread ticker_;
};

int Run(int argc, char** argv) {
  // Never outlives the test that started it.
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  Flags flags = kDefaults;
  for (int idx = 1; idx < argc; ++idx) {
    const std::string argument = argv[idx];
    const size_t equals = argument.find('=');
    if (equals == std::string::npos || !kDefaults.contains(argument.substr(0, equals))) {
      std::cerr << "unknown argument " << argument << "\n";
      return 2;
    }
    flags[argument.substr(0, equals)] = argument.substr(equals + 1);
  }
  Daemon(std::move(flags)).Serve();
  return 0;
}

}  // namespace
}  // namespace crumb::testing

int main(int argc, char** argv) {
  return crumb::testing::Run(argc, argv);
}
