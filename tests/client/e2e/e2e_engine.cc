// SPDX-License-Identifier: Apache-2.0
//
// An engine that does as it is told, line by line; see tests/client/e2e/engine_process.h.
#include <memory>
#include <string>

#include "crumb/client.h"
#include "tests/client/e2e/command_loop.h"
#include "tests/client/e2e/e2e_model.h"

namespace crumb {
namespace {

class Engine {
 public:
  Engine(const std::string& address, DataPlane data_plane)
      : client_(*Client::Create({.address = address,
                                 .client_name = "e2e_engine",
                                 .profile = profile_,
                                 .data_plane = data_plane})) {}

  absl::Status WaitAttached() { return client_->WaitAttached(absl::Seconds(20)); }

  std::string Publish(uint32_t seed, uint32_t num_tokens) {
    const Activations activations(*profile_, kE2eQueryHeads, num_tokens, seed);
    const auto sequence = E2eSequence(profile_, activations, num_tokens);
    const auto result = client_->Publish(*sequence, E2ePrompt(seed, num_tokens), {});
    if (!result.ok()) {
      return "error " + result.status().ToString();
    }
    return "published " + std::to_string(result->pages_added) + " " +
           std::to_string(result->pages_present);
  }

  std::string Lookup(uint32_t seed, uint32_t num_tokens) {
    auto found = client_->Lookup(E2ePrompt(seed, num_tokens), {});
    if (!found.ok()) {
      return "error " + found.status().ToString();
    }
    prefix_ = *std::move(found);
    return "found " + std::to_string(prefix_->usable_tokens());
  }

  std::string Validate() {
    return prefix_ == nullptr ? "nothing held" : prefix_->Validate().ToString();
  }

  // A line for each round.
  [[noreturn]] std::string Churn(uint32_t seed) {
    for (uint32_t round = 0;; ++round) {
      Say(Publish(seed + round, 512) + ", " + Lookup(seed + round, 513));
    }
  }

 private:
  std::shared_ptr<const Profile> profile_ = E2eProfile();
  std::unique_ptr<Client> client_;
  std::shared_ptr<PrefixHandle> prefix_;
};

int Main(const std::string& address, const std::string& data_plane) {
  Engine engine(address, data_plane == "ucx" ? DataPlane::kUcx : DataPlane::kMap);
  return Obey(engine.WaitAttached(),
              {{"publish", [&](uint32_t seed,
                               uint32_t num_tokens) { return engine.Publish(seed, num_tokens); }},
               {"lookup", [&](uint32_t seed,
                              uint32_t num_tokens) { return engine.Lookup(seed, num_tokens); }},
               {"validate", [&](uint32_t, uint32_t) { return engine.Validate(); }},
               {"churn", [&](uint32_t seed, uint32_t) { return engine.Churn(seed); }}});
}

}  // namespace
}  // namespace crumb

int main(int argc, char** argv) {
  return argc == 3 ? crumb::Main(argv[1], argv[2]) : 2;
}
