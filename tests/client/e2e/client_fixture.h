// SPDX-License-Identifier: Apache-2.0
//
// A real crumbd, clients of it in this process, and the prompts and prefills that they share.
#pragma once

#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

#include "crumb/client.h"
#include "proto/base/clock.h"
#include "tests/client/e2e/e2e_model.h"
#include "tests/support/daemon_process.h"

namespace crumb {

class ClientTest : public testing::Test {
 protected:
  void StartDaemon(std::vector<std::string> flags = {}) {
    flags_ = std::move(flags);
    auto daemon = DaemonProcess::Start({.flags = flags_, .directory = directory_});
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = *std::move(daemon);
  }
  // A daemon in the place of the one that was killed.
  void RestartDaemon() {
    auto next = DaemonProcess::Start({.flags = flags_, .directory = daemon_->directory()});
    ASSERT_TRUE(next.ok()) << next.status();
    killed_.push_back(std::exchange(daemon_, *std::move(next)));
  }
  std::unique_ptr<Client> NewClient(DataPlane plane = DataPlane::kMap) {
    auto client = Client::Create({.address = daemon_->address(),
                                  .profile = profile_,
                                  .data_plane = plane,
                                  .reconnect_backoff_max = absl::Milliseconds(200)});
    EXPECT_TRUE(client.ok()) << client.status();
    EXPECT_TRUE((*client)->WaitAttached(absl::Seconds(20)).ok())
        << (*client)->WaitAttached(absl::ZeroDuration());
    return *std::move(client);
  }
  std::unique_ptr<Sequence> Prefill(uint32_t num_tokens) {
    return E2eSequence(profile_, activations_, num_tokens);
  }
  // An answer of crumbctl, asked again until it has `text` in it: what the daemon does when a
  // process has died takes it a moment.
  bool StatusBecomes(const std::string& text) {
    const absl::Time deadline = Clock::System().Now() + absl::Seconds(20);
    do {
      status_ = RunProgram("crumbctl", {"--address=" + daemon_->address(), "status", "--json"}).out;
      if (status_.find(text) != std::string::npos) {
        return true;
      }
    } while (Clock::System().Now() < deadline);
    return false;
  }
  static void WaitFor(const std::function<bool()>& condition) {
    const absl::Time deadline = Clock::System().Now() + absl::Seconds(20);
    while (!condition()) {
      ASSERT_LT(Clock::System().Now(), deadline);
      std::this_thread::yield();
    }
  }

  // Every thread of the daemon stands still on return: a stop takes hold of them one by one.
  void StopDaemon() {
    daemon_->Signal(SIGSTOP);
    const std::filesystem::path tasks = "/proc/" + std::to_string(daemon_->pid()) + "/task";
    WaitFor([&] {
      for (const auto& task : std::filesystem::directory_iterator(tasks)) {
        std::string stat;
        std::getline(std::ifstream(task.path() / "stat"), stat);
        const size_t state = stat.rfind(')');
        if (state == std::string::npos || stat.substr(state, 3) != ") T") {
          return false;
        }
      }
      return true;
    });
  }

  std::shared_ptr<const Profile> profile_ = E2eProfile();
  Activations activations_{*profile_, kE2eQueryHeads, kE2eMaxTokens, /*seed=*/5};
  std::vector<uint32_t> prompt_ = E2ePrompt(5, kE2eMaxTokens);
  std::filesystem::path directory_;
  std::vector<std::string> flags_;
  std::unique_ptr<DaemonProcess> daemon_;
  std::vector<std::unique_ptr<DaemonProcess>> killed_;
  std::string status_;
};

}  // namespace crumb
