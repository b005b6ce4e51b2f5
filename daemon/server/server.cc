// SPDX-License-Identifier: Apache-2.0
#include "daemon/server/server.h"

#include <sys/random.h>

#include <algorithm>
#include <optional>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"

#include "daemon/demote/demote_pool.h"
#include "daemon/demote/gpu_demoter.h"
#include "daemon/log/log.h"
#include "daemon/metrics/metrics.h"
#include "daemon/promote/arena_holder.h"
#include "daemon/promote/promoter.h"
#include "daemon/rpc/grpc_server.h"
#include "daemon/rpc/profile_registry.h"
#include "daemon/rpc/rpc_context.h"
#include "daemon/rpc/session_registry.h"
#include "daemon/server/socket_claim.h"
#include "daemon/tier/gpu_tier.h"
#include "daemon/transfer/memory_socket_server.h"
#include "daemon/transfer/session_table.h"
#include "daemon/transfer/ucx_server.h"
#include "proto/base/check.h"
#include "proto/base/status_macros.h"
#include "proto/base/version.h"

namespace crumb {
namespace {

constexpr absl::Duration kTickInterval = absl::Milliseconds(100);
// For calls that are being answered when the publishes are done: reads of the store, which take
// milliseconds. Not longer, since gRPC waits for connections to close too, and an idle engine,
// which does not look at its own, keeps it open to the end.
constexpr absl::Duration kShutdownGrace = absl::Milliseconds(100);

// Another number after each start, so that an engine sees that its session is of another life.
uint64_t MakeEpoch() {
  uint64_t epoch = 0;
  while (epoch == 0) {
    CRUMB_CHECK(getrandom(&epoch, sizeof(epoch), 0) == sizeof(epoch), "getrandom gives 8 bytes");
  }
  return epoch;
}

DemotePool::Options PoolOptions(const Config& config) {
  DemotePool::Options options = config.demote;
  if (options.num_threads == 0) {
    // Two at least: one page's demotion, of milliseconds, is not to hold up what is only copied.
    options.num_threads = std::max(2u, std::thread::hardware_concurrency() / 2);
  }
  return options;
}

// Calls Tick until it is destroyed.
class Maintenance {
 public:
  explicit Maintenance(PageStore& store) : store_(store), thread_([this] { RunThread(); }) {}
  ~Maintenance() {
    {
      absl::MutexLock lock(&mutex_);
      stopped_ = true;
    }
    thread_.join();
  }
  Maintenance(const Maintenance&) = delete;
  Maintenance& operator=(const Maintenance&) = delete;

 private:
  void RunThread() {
    absl::MutexLock lock(&mutex_);
    while (!mutex_.AwaitWithTimeout(absl::Condition(&stopped_), kTickInterval)) {
      store_.Tick();
    }
  }

  PageStore& store_;
  absl::Mutex mutex_;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace

class Server::Impl {
 public:
  Impl(const Config& config, const Clock& clock) : config_(config), clock_(clock) {}
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl() { Stop(); }

  absl::Status Start() {
    CRUMB_RETURN_IF_ERROR(CheckConfig(config_));
    CRUMB_ASSIGN_OR_RETURN(claim_, SocketClaim::Take(config_.unix_socket));
    StartGpuTier();
    CRUMB_ASSIGN_OR_RETURN(store_, PageStore::Create(config_.store, clock_, gpu_tier_.get()));
    if (gpu_tier_ != nullptr) {
      arena_holder_ = std::make_unique<ArenaHolder>(*store_, *gpu_tier_);
      promoter_ = std::make_unique<Promoter>(*store_, *gpu_tier_);
    }
    metrics_ = std::make_unique<Metrics>(*store_, session_table_, kCrumbVersion);
    StartGpuDemoter();
    pool_ = std::make_unique<DemotePool>(PoolOptions(config_));
    CRUMB_RETURN_IF_ERROR(StartDataPlanes());
    if (!config_.metrics.empty()) {
      CRUMB_ASSIGN_OR_RETURN(metrics_port_, metrics_->Listen(config_.metrics));
    }
    maintenance_ = std::make_unique<Maintenance>(*store_);
    CRUMB_RETURN_IF_ERROR(StartControlPlane());
    LogReady();
    return absl::OkStatus();
  }

  void Drain() {
    LogEvent(LogLevel::kInfo, "draining", {{"publishes", store_->Status().publishes}});
    store_->SetDraining();
    grpc_->SetDraining();
    const absl::Time deadline = clock_.Now() + config_.drain_timeout;
    while (store_->Status().publishes > 0 && clock_.Now() < deadline) {
      // sleeps: engines need time to finish what they publish, and nothing tells of the last one.
      absl::SleepFor(absl::Milliseconds(10));
    }
    Stop();
    LogEvent(LogLevel::kInfo, "stopped",
             {{"seconds", absl::ToDoubleSeconds(clock_.Now() - start_time_)}});
  }

 private:
  friend class Server;

  // Without a GPU the daemon serves from host memory, and says why.
  void StartGpuTier() {
    if (config_.gpu.arena_bytes == 0) {
      gpu_note_ = "the daemon keeps no pages on a GPU, since [store] gpu_arena is 0";
      data_planes_.push_back("GPU memory: not offered, since [store] gpu_arena is 0");
      return;
    }
    auto tier = GpuTier::Create({.device = static_cast<int>(config_.gpu.device),
                                 .capacity_bytes = config_.gpu.arena_bytes,
                                 .segment_bytes = config_.gpu.chunk_bytes});
    if (tier.ok()) {
      gpu_tier_ = *std::move(tier);
      data_planes_.push_back(absl::StrCat("GPU memory: ", gpu_tier_->Description()));
      return;
    }
    gpu_note_ = absl::StrCat("the daemon keeps no pages on a GPU: ", tier.status().message());
    data_planes_.push_back(absl::StrCat("GPU memory: not offered: ", tier.status().message()));
    LogEvent(LogLevel::kWarning, "gpu_arena_off", {{"status", tier.status()}});
  }

  // Pages that come in BF16 are demoted beside their copies; without a GPU, or if it has no memory
  // left for it, by the pool itself.
  void StartGpuDemoter() {
    if (gpu_tier_ == nullptr) {
      return;
    }
    auto demoter = GpuDemoter::Create(*gpu_tier_, PoolOptions(config_).num_threads);
    if (demoter.ok()) {
      demoter_ = *std::move(demoter);
      data_planes_.back() += "; pages that come in BF16 are demoted there";
      return;
    }
    data_planes_.back() += absl::StrCat("; pages that come in BF16 are demoted on the CPU: ",
                                        demoter.status().message());
    LogEvent(LogLevel::kWarning, "gpu_demotion_off", {{"status", demoter.status()}});
  }

  absl::Status StartDataPlanes() {
    CRUMB_ASSIGN_OR_RETURN(memory_socket_,
                           MemorySocketServer::Create(
                               {.path = config_.memory_socket(), .mode = config_.unix_socket_mode},
                               *store_, session_table_));
    data_planes_.push_back(memory_socket_->Description());
    if (!config_.ucx.enabled) {
      data_planes_.push_back("UCX: not offered, since [ucx] enabled is false");
      return absl::OkStatus();
    }
    UcxServerOptions options;
    options.host = config_.ucx.host;
    options.port = config_.ucx.port;
    options.ucx.transports = config_.ucx.transports;
    auto ucx = UcxServer::Create(options, *store_, session_table_, *metrics_, clock_);
    if (!ucx.ok()) {
      return {ucx.status().code(),
              absl::StrCat(ucx.status().message(),
                           ": free the port, if one is named, or set other host, port or "
                           "transports in [ucx]")};
    }
    ucx_ = *std::move(ucx);
    data_planes_.push_back(ucx_->Description());
    return absl::OkStatus();
  }

  absl::Status StartControlPlane() {
    GpuOffer gpu{.gpu = std::nullopt, .note = gpu_note_};
    if (gpu_tier_ != nullptr) {
      gpu.gpu = gpu_tier_->uuid();
    }
    sessions_.emplace(*store_, session_table_, ucx_.get(), std::move(gpu));
    start_time_ = clock_.Now();
    context_.emplace(RpcContext{.store = *store_,
                                .session_table = session_table_,
                                .sessions = *sessions_,
                                .profiles = profiles_,
                                .pool = *pool_,
                                .metrics = *metrics_,
                                .clock = clock_,
                                .demoter = demoter_.get(),
                                .ucx = ucx_.get(),
                                .memory_socket = config_.memory_socket(),
                                .data_planes = data_planes_,
                                .version = kCrumbVersion,
                                .epoch = MakeEpoch(),
                                .start_time = start_time_});
    CRUMB_ASSIGN_OR_RETURN(grpc_, GrpcServer::Create({.unix_socket = config_.unix_socket,
                                                      .unix_socket_mode = config_.unix_socket_mode,
                                                      .tcp = config_.tcp},
                                                     *context_));
    return absl::OkStatus();
  }

  void LogReady() const {
    for (const std::string& words : data_planes_) {
      LogEvent(LogLevel::kInfo, "data_plane", {{"offer", words}});
    }
    if (!config_.tcp.empty()) {
      LogEvent(LogLevel::kWarning, "listening_in_clear_text",
               {{"tcp", config_.tcp}, {"port", grpc_->tcp_port()}});
    }
    LogEvent(LogLevel::kInfo, "ready",
             {{"version", kCrumbVersion},
              {"unix_socket", config_.unix_socket},
              {"metrics_port", metrics_port_},
              {"tcp_port", grpc_->tcp_port()},
              {"capacity_bytes", config_.store.capacity_bytes},
              {"gpu_arena_bytes", store_->Status().copy_capacity_bytes},
              {"demote_threads", PoolOptions(config_).num_threads}});
  }

  // From the outside in: first those who bring work, last the store. Also halfway through Start.
  void Stop() {
    if (pool_ != nullptr) {
      pool_->Stop();  // Answers the commits it holds, which the control plane would wait for.
    }
    if (grpc_ != nullptr) {
      grpc_->Shutdown(kShutdownGrace);  // Ends all sessions.
      grpc_.reset();
    }
    if (ucx_ != nullptr) {
      ucx_->Stop();
    }
    if (memory_socket_ != nullptr) {
      memory_socket_->Stop();
    }
    maintenance_.reset();
    promoter_.reset();
    arena_holder_.reset();
  }

  const Config config_;
  const Clock& clock_;
  std::vector<std::string> data_planes_;
  std::string gpu_note_;  // Why pages are not offered on a GPU.
  uint16_t metrics_port_ = 0;
  absl::Time start_time_;

  // In the order in which they are made; each refers only to those before it.
  std::optional<SocketClaim> claim_;
  std::unique_ptr<GpuTier> gpu_tier_;  // Null: none.
  std::unique_ptr<PageStore> store_;
  std::unique_ptr<ArenaHolder> arena_holder_;  // Null: none.
  std::unique_ptr<Promoter> promoter_;         // Null: none.
  SessionTable session_table_;
  ProfileRegistry profiles_;
  std::unique_ptr<Metrics> metrics_;
  std::unique_ptr<GpuDemoter> demoter_;  // Null: none.
  std::unique_ptr<DemotePool> pool_;
  std::unique_ptr<MemorySocketServer> memory_socket_;
  std::unique_ptr<UcxDataPlane> ucx_;  // Null: not offered.
  std::unique_ptr<Maintenance> maintenance_;
  std::optional<SessionRegistry> sessions_;
  std::optional<RpcContext> context_;
  std::unique_ptr<GrpcServer> grpc_;
};

Server::Server(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Server::~Server() = default;

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const Config& config, const Clock& clock) {
  auto impl = std::make_unique<Impl>(config, clock);
  CRUMB_RETURN_IF_ERROR(impl->Start());
  return std::unique_ptr<Server>(new Server(std::move(impl)));
}

void Server::Drain() {
  impl_->Drain();
}

const Config& Server::config() const {
  return impl_->config_;
}

uint16_t Server::tcp_port() const {
  return impl_->grpc_->tcp_port();
}

uint16_t Server::metrics_port() const {
  return impl_->metrics_port_;
}

const std::vector<std::string>& Server::data_planes() const {
  return impl_->data_planes_;
}

PageStore& Server::store() {
  return *impl_->store_;
}

DemotePool& Server::demote_pool() {
  return *impl_->pool_;
}

}  // namespace crumb
