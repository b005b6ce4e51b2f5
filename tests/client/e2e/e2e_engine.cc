// SPDX-License-Identifier: Apache-2.0
//
// An engine that does as it is told, line by line; see tests/client/e2e/engine_process.h.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "crumb/client.h"
#include "tests/client/e2e/command_loop.h"
#include "tests/client/e2e/e2e_model.h"
#include "tests/client/e2e/raw_session.h"

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

  [[noreturn]] std::string Read() {
    std::vector<std::byte> image(profile_->geometry().PageBytes(PageEncoding::kInt2));
    for (bool first = true;; first = false) {
      for (uint32_t page = 1; page < prefix_->num_pages(); ++page) {
        (void)prefix_->CopyPage(PageIdx(page), PageEncoding::kInt2, image);
      }
      if (first) {
        Say("reading");
      }
    }
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

// The steps of a lookup and of a publish, each a command.
class Steps {
 public:
  Steps(std::string address, DataPlane data_plane)
      : address_(std::move(address)), data_plane_(data_plane) {}

  std::string Find(uint32_t seed, uint32_t num_tokens) {
    auto found = session().Lookup(E2ePrompt(seed, num_tokens));
    if (!found.ok()) {
      return "error " + found.status().ToString();
    }
    found_ = *std::move(found);
    return "found " + std::to_string(found_.matched_tokens);
  }
  std::string Open() {
    auto source = session().Open(found_);
    if (!source.ok()) {
      return source.status().ToString();
    }
    source_ = *std::move(source);
    return source_->Validate().ToString();
  }
  std::string Stage(uint32_t seed, uint32_t num_tokens) {
    const std::vector<BFloat16> rows(num_tokens / kPageTokens * session().PageElements());
    auto staged = session().Stage(E2ePrompt(seed, num_tokens), rows);
    if (!staged.ok()) {
      return "error " + staged.status().ToString();
    }
    staged_ = *std::move(staged);
    return "staged";
  }
  std::string Write() {
    const absl::Status written = session().WriteAllButOne(&staged_);
    return written.ok() ? "written" : "error " + written.ToString();
  }
  std::string Commit() {
    const auto counts = session().Commit(staged_);
    return counts.ok() ? "committed " + std::to_string(counts->pages_added)
                       : "error " + counts.status().ToString();
  }

 private:
  RawSession& session() {
    if (session_ == nullptr) {
      session_ = std::make_unique<RawSession>(address_, profile_, data_plane_);
    }
    return *session_;
  }

  const std::string address_;
  const DataPlane data_plane_;
  std::shared_ptr<const Profile> profile_ = E2eProfile();
  std::unique_ptr<RawSession> session_;  // Attached at the first command.
  FoundPrefix found_;
  std::unique_ptr<PageSource> source_;
  CommitParams staged_;
};

int Main(const std::string& address, const std::string& plane_name) {
  const DataPlane data_plane = plane_name == "ucx" ? DataPlane::kUcx : DataPlane::kMap;
  Engine engine(address, data_plane);
  Steps steps(address, data_plane);
  return Obey(
      engine.WaitAttached(),
      {{"publish",
        [&](uint32_t seed, uint32_t num_tokens) { return engine.Publish(seed, num_tokens); }},
       {"lookup",
        [&](uint32_t seed, uint32_t num_tokens) { return engine.Lookup(seed, num_tokens); }},
       {"validate", [&](uint32_t, uint32_t) { return engine.Validate(); }},
       {"churn", [&](uint32_t seed, uint32_t) { return engine.Churn(seed); }},
       {"read", [&](uint32_t, uint32_t) { return engine.Read(); }},
       {"find", [&](uint32_t seed, uint32_t num_tokens) { return steps.Find(seed, num_tokens); }},
       {"open", [&](uint32_t, uint32_t) { return steps.Open(); }},
       {"stage", [&](uint32_t seed, uint32_t num_tokens) { return steps.Stage(seed, num_tokens); }},
       {"write", [&](uint32_t, uint32_t) { return steps.Write(); }},
       {"commit", [&](uint32_t, uint32_t) { return steps.Commit(); }}});
}

}  // namespace
}  // namespace crumb

int main(int argc, char** argv) {
  return argc == 3 ? crumb::Main(argv[1], argv[2]) : 2;
}
