// SPDX-License-Identifier: Apache-2.0
//
// A daemon in another process that serves a published prefix over UCX, and a session connected to
// it. The parameter is UCX's transports.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

#include "client/transport/ucx_transport.h"
#include "proto/base/clock.h"
#include "tests/support/transfer_pages.h"
#include "tests/support/transfer_process.h"

namespace crumb::testing {

inline constexpr Geometry kGeometry{
    .num_layers = 5, .num_kv_heads = 3, .key_dim = 64, .value_dim = 64};
inline constexpr uint32_t kSinkPages = 1;
inline constexpr uint32_t kPages = 12;

inline absl::Time Soon() {
  return Clock::System().Now() + absl::Seconds(20);  // Longer than a loaded machine needs.
}

class UcxServerTest : public ::testing::TestWithParam<const char*> {
 protected:
  UcxServerTest() : profile_(MakeTransferProfile(kGeometry, kSinkPages)) {
    options_.ordered_layers = 2;  // Then images, however short they are.
  }

  // Starts a daemon with a published prefix of kPages pages, and connects.
  void Start(const std::vector<std::string>& more = {}) {
    std::vector<std::string> arguments = {absl::StrCat("transports=", GetParam()), "layers=5",
                                          "heads=3", "dim=64", "sink_pages=1"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    daemon_ = std::make_unique<TransferProcess>(arguments);
    daemon_->Ask(absl::StrCat("publish 1 ", kPages));
    session_ = daemon_->OpenSession(profile_);
    options_.ucx.transports = GetParam();
    options_.chunk_bytes = 10000;  // Cuts through head blocks, in layers and in images.
    transport_ = Connect(session_);
  }
  std::unique_ptr<PageTransport> Connect(const SessionInfo& session) {
    auto transport = ConnectUcxWithOptions(options_, session, Soon());
    EXPECT_TRUE(transport.ok()) << transport.status();
    return transport.ok() ? *std::move(transport) : nullptr;
  }
  absl::Status Pull(const LeasedPrefix& prefix, size_t* wrong_blocks = nullptr) {
    const auto source = transport_->Open(prefix, Soon());
    if (!source.ok()) {
      return source.status();
    }
    const absl::Status status = (*source)->Validate();
    if (status.ok() && wrong_blocks != nullptr) {
      *wrong_blocks = CountWrongBlocks(**source, session_, prefix, 1);
    }
    return status;
  }
  // The daemon counts and lets go of things on its own thread, a moment after its client is
  // content.
  void ExpectSoon(uint64_t TransferProcess::Stats::*count, uint64_t expected) {
    const absl::Time end = Soon();
    uint64_t value = daemon_->GetStats().*count;
    while (value != expected && Clock::System().Now() < end) {
      value = daemon_->GetStats().*count;
    }
    EXPECT_EQ(value, expected);
  }
  void ExpectNothingHeld() { ExpectSoon(&TransferProcess::Stats::held_pages, 0); }
  void ExpectNothingStaged() { ExpectSoon(&TransferProcess::Stats::staging_bytes, 0); }

  const std::shared_ptr<const Profile> profile_;
  std::unique_ptr<TransferProcess> daemon_;
  SessionInfo session_;
  UcxTransportOptions options_;
  std::unique_ptr<PageTransport> transport_;
};

}  // namespace crumb::testing
