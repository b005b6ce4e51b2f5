// SPDX-License-Identifier: Apache-2.0
//
// An engine that does as it is told, line by line; see tests/client/e2e/engine_process.h.

#include <cstdio>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>

#include "crumb/client.h"
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

 private:
  std::shared_ptr<const Profile> profile_ = E2eProfile();
  std::unique_ptr<Client> client_;
  std::shared_ptr<PrefixHandle> prefix_;
};

void Say(const std::string& line) {
  std::puts(line.c_str());
  std::fflush(stdout);
}

int Main(const std::string& address, const std::string& data_plane) {
  Engine engine(address, data_plane == "ucx" ? DataPlane::kUcx : DataPlane::kMap);
  if (const absl::Status status = engine.WaitAttached(); !status.ok()) {
    Say(status.ToString());
    return 1;
  }
  Say("attached");
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string command;
    uint32_t seed = 0;
    uint32_t num_tokens = 0;
    words >> command >> seed >> num_tokens;
    if (command == "publish") {
      Say(engine.Publish(seed, num_tokens));
    } else if (command == "lookup") {
      Say(engine.Lookup(seed, num_tokens));
    } else if (command == "validate") {
      Say(engine.Validate());
    } else if (command == "churn") {
      for (uint32_t round = 0;; ++round) {
        Say(engine.Publish(seed + round, 512) + ", " + engine.Lookup(seed + round, 513));
      }
    }
  }
  return 0;
}

}  // namespace
}  // namespace crumb

int main(int argc, char** argv) {
  return argc == 3 ? crumb::Main(argv[1], argv[2]) : 2;
}
