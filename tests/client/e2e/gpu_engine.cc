// SPDX-License-Identifier: Apache-2.0
//
// An engine on a GPU that does as it is told, line by line:
//
//   lookup SEED TOKENS   "found USABLE, ON_GPU pages on the GPU"; holds the prefix
//   validate             "OK", or the status of the prefix held
//   decode               "decoding": launches attention over the prefix for ever, without waiting
//   watch                "decoding"; and once Validate says that the prefix is over, its code and
//                        what CUDA said to all the kernels until then
//   share                "PID FD": has made memory that can be shared, of this descriptor, its
//   bytes 7 fill, store          writes to a page of the daemon's, by cudaMemset or in a kernel:
//   what CUDA
//                        said to that
#include <cuda_runtime.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <thread>

#include "crumb/client.h"
#include "crumb/cuda/checksum_pages.h"
#include "crumb/cuda/shared_memory.h"
#include "proto/base/clock.h"
#include "tests/client/e2e/command_loop.h"
#include "tests/client/e2e/e2e_model.h"
#include "tests/client/e2e/gpu_prefix.h"

namespace crumb {
namespace {

class Engine {
 public:
  explicit Engine(const std::string& address)
      : client_(*Client::Create({.address = address,
                                 .client_name = "gpu_engine",
                                 .profile = profile_,
                                 .data_plane = DataPlane::kMap,
                                 .gpu = 0})) {}

  absl::Status WaitAttached() { return client_->WaitAttached(absl::Seconds(20)); }

  // Until all of its pages are on the GPU: what is not is copied there, for the next lookup.
  std::string Lookup(uint32_t seed, uint32_t num_tokens) {
    const absl::Time deadline = Clock::System().Now() + absl::Seconds(20);
    uint32_t on_gpu = 0;
    do {
      auto found = client_->Lookup(E2ePrompt(seed, num_tokens), {.on_gpu = true});
      if (!found.ok()) {
        return "error " + found.status().ToString();
      }
      prefix_ = *std::move(found);
      on_gpu = PagesOnGpu(*prefix_, *profile_);
      std::this_thread::yield();
    } while (on_gpu < prefix_->num_pages() && Clock::System().Now() < deadline);
    return "found " + std::to_string(prefix_->usable_tokens()) + ", " + std::to_string(on_gpu) +
           " pages on the GPU";
  }

  std::string Validate() {
    return prefix_ == nullptr ? "nothing held" : prefix_->Validate().ToString();
  }

  std::string Write(bool in_a_kernel) {
    auto* const page = const_cast<std::byte*>(prefix_->GpuPage(PageIdx(1), PageEncoding::kInt2));
    if (in_a_kernel) {
      const DeviceBuffer<const std::byte*> pages(std::vector<const std::byte*>{page});
      const absl::Status launched = ChecksumPages({.num_pages = 1,
                                                   .num_ranges = 1,
                                                   .pages = pages.data(),
                                                   .offset = 0,
                                                   .range_stride = 512,
                                                   .range_bytes = 512,
                                                   .checksums = reinterpret_cast<uint32_t*>(page)},
                                                  nullptr);
      cudaDeviceSynchronize();
      return launched.ok() ? cudaGetErrorName(cudaGetLastError()) : launched.ToString();
    }
    const cudaError_t filled = cudaMemset(page, 0xff, 64);
    const cudaError_t done = cudaDeviceSynchronize();
    return cudaGetErrorName(filled != cudaSuccess ? filled : done);
  }

  std::string Share() {
    shared_ = *SharedGpuMemory::Create(0, 1);
    const cudaError_t filled = cudaMemset(shared_->data(), 7, shared_->bytes());
    const cudaError_t done = cudaDeviceSynchronize();
    return filled != cudaSuccess || done != cudaSuccess
               ? "error"
               : std::to_string(::getpid()) + " " + std::to_string(shared_->fd());
  }

  std::string Watch() {
    Say("decoding");
    GpuAttention attention(*prefix_, *profile_);
    const std::vector<float> first = attention.Run();
    absl::Status status;
    bool same = true;
    while ((status = prefix_->Validate()).ok()) {
      same = attention.Run() == first && same;
    }
    same = attention.Run() == first && same;  // What the dead left is still mapped.
    return absl::StatusCodeToString(status.code()) + (same ? ", " : ", other results, ") +
           cudaGetErrorName(cudaDeviceSynchronize());
  }

  [[noreturn]] std::string DecodeForEver() {
    Say("decoding");
    GpuAttention attention(*prefix_, *profile_);
    for (;;) {
      attention.Launch();
    }
  }

 private:
  std::shared_ptr<const Profile> profile_ = GpuE2eProfile();
  std::unique_ptr<Client> client_;
  std::shared_ptr<PrefixHandle> prefix_;
  std::unique_ptr<SharedGpuMemory> shared_;
};

int Main(const std::string& address) {
  Engine engine(address);
  return Obey(engine.WaitAttached(),
              {{"lookup", [&](uint32_t seed,
                              uint32_t num_tokens) { return engine.Lookup(seed, num_tokens); }},
               {"validate", [&](uint32_t, uint32_t) { return engine.Validate(); }},
               {"fill", [&](uint32_t, uint32_t) { return engine.Write(/*in_a_kernel=*/false); }},
               {"store", [&](uint32_t, uint32_t) { return engine.Write(/*in_a_kernel=*/true); }},
               {"share", [&](uint32_t, uint32_t) { return engine.Share(); }},
               {"watch", [&](uint32_t, uint32_t) { return engine.Watch(); }},
               {"decode", [&](uint32_t, uint32_t) { return engine.DecodeForEver(); }}});
}

}  // namespace
}  // namespace crumb

int main(int argc, char** argv) {
  return argc == 3 ? crumb::Main(argv[1]) : 2;
}
