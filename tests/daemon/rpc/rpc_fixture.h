// SPDX-License-Identifier: Apache-2.0
//
// A whole daemon in this process, on real sockets, and engines that speak to it by gRPC's stubs
// alone, so that they can say what libcrumb never would.
#pragma once

#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "daemon/log/log.h"
#include "daemon/server/server.h"
#include "proto/base/bfloat16.h"
#include "proto/base/crc32c.h"
#include "proto/crumb/v1/cache.grpc.pb.h"
#include "tests/daemon/transfer/memory_socket_peer.h"
#include "tests/support/test_profile.h"

namespace crumb {

// As tokens travel.
inline std::string Packed(const std::vector<uint32_t>& tokens) {
  return {reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(uint32_t)};
}
// Tokens of `pages` whole pages. No two salts share a page.
inline std::vector<uint32_t> Prompt(uint32_t salt, uint32_t pages) {
  std::vector<uint32_t> tokens(size_t{pages} * kPageTokens);
  for (size_t i = 0; i < tokens.size(); ++i) {
    tokens[i] = salt * 1000 + static_cast<uint32_t>(i % 1000);
  }
  return tokens;
}

// A deadline, so that a test that hangs fails.
inline std::unique_ptr<grpc::ClientContext> Soon() {
  auto context = std::make_unique<grpc::ClientContext>();
  context->set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
  return context;
}

// The code, and what the message must have.
inline void ExpectStatus(const grpc::Status& status,
                         grpc::StatusCode code,
                         std::initializer_list<std::string> parts) {
  EXPECT_EQ(status.error_code(), code) << status.error_message();
  for (const std::string& part : parts) {
    EXPECT_THAT(status.error_message(), testing::HasSubstr(part));
  }
}

inline void ExpectInvalid(const grpc::Status& status, std::initializer_list<std::string> parts) {
  ExpectStatus(status, grpc::StatusCode::INVALID_ARGUMENT, parts);
}

// One rank that is attached as long as this lives. Confined to one thread.
class TestEngine {
 public:
  TestEngine(v1::Cache::Stub& stub, const v1::AttachRequest& request)
      : stream_(stub.Attach(context_.get())) {
    stream_->Write(request);
    is_attached_ = stream_->Read(&reply_);
    if (!is_attached_) {
      status_ = stream_->Finish();
    }
  }
  ~TestEngine() {
    if (is_attached_) {
      Break();
    }
  }
  TestEngine(const TestEngine&) = delete;
  TestEngine& operator=(const TestEngine&) = delete;

  bool is_attached() const { return is_attached_; }
  const grpc::Status& status() const { return status_; }  // Why it is not attached.
  const v1::AttachReply& reply() const { return reply_; }
  const v1::SessionKey& session() const { return reply_.session(); }

  // As when the engine dies.
  void Break() {
    is_attached_ = false;
    context_->TryCancel();
    status_ = stream_->Finish();
  }
  // Blocks for the daemon's next message. False: it has ended the stream.
  bool ReadNews(v1::AttachReply* news) { return stream_->Read(news); }
  // A second request on the stream, which takes one.
  grpc::Status AttachAgain(const v1::AttachRequest& request) {
    is_attached_ = false;
    stream_->Write(request);
    v1::AttachReply none;
    EXPECT_FALSE(stream_->Read(&none));
    return stream_->Finish();
  }

  // Hands `bytes` over as staging memory.
  void GiveStaging(std::span<const std::byte> bytes) {
    const UniqueFd memfd(memfd_create("staging", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    ASSERT_EQ(write(memfd.get(), bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
    ASSERT_EQ(fcntl(memfd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
    MemoryRequest request;
    request.op = MemoryOp::kGiveStaging;
    request.session_id = session().id();
    std::memcpy(request.session_secret.data(), session().secret().data(), kSessionSecretBytes);
    request.argument = bytes.size();
    const int fd = memfd.get();
    const auto answer = MemorySocketPeer(reply_.memory_socket()).Ask(request, std::span(&fd, 1));
    ASSERT_TRUE(answer.has_value());
    ASSERT_EQ(answer->code(), absl::StatusCode::kOk) << answer->message();
  }

 private:
  const std::unique_ptr<grpc::ClientContext> context_ = Soon();
  const std::unique_ptr<grpc::ClientReaderWriter<v1::AttachRequest, v1::AttachReply>> stream_;
  bool is_attached_ = false;
  grpc::Status status_;
  v1::AttachReply reply_;
};

class RpcTest : public testing::Test {
 protected:
  RpcTest() : RpcTest([](Config&) {}) {}
  // Of a daemon whose configuration `adjust` has changed.
  explicit RpcTest(void (*adjust)(Config& config)) {
    std::filesystem::create_directory(directory_);
    Config config;
    config.unix_socket = directory_ / "crumbd.sock";
    config.metrics.clear();
    config.store.capacity_bytes = size_t{64} << 20;
    config.store.chunk_bytes = size_t{1} << 20;
    config.demote.num_threads = 2;
    adjust(config);
    InitLog(LogLevel::kOff, LogFormat::kText);
    auto server = Server::Start(config, Clock::System());
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    channel_ =
        grpc::CreateChannel("unix:" + config.unix_socket, grpc::InsecureChannelCredentials());
    stub_ = v1::Cache::NewStub(channel_);
  }
  ~RpcTest() override {
    server_.reset();
    std::filesystem::remove_all(directory_);
  }

  // A request that is granted.
  v1::AttachRequest GoodAttach() const {
    v1::AttachRequest request;
    request.set_client_name("test");
    request.set_pid(static_cast<uint32_t>(getpid()));
    request.set_profile_id(profile_->id().bytes.data(), Digest::kBytes);
    request.set_profile_file(profile_->file().data(), profile_->file().size());
    request.set_library_version("1");
    return request;
  }
  std::unique_ptr<TestEngine> Attach() {
    auto engine = std::make_unique<TestEngine>(*stub_, GoodAttach());
    EXPECT_TRUE(engine->is_attached()) << engine->status().error_message();
    return engine;
  }
  // Why `request` is refused.
  grpc::Status AttachRefusal(const v1::AttachRequest& request) {
    const TestEngine engine(*stub_, request);
    EXPECT_FALSE(engine.is_attached());
    return engine.status();
  }

  grpc::Status Lookup(const v1::LookupRequest& request, v1::LookupReply* reply) {
    return stub_->Lookup(Soon().get(), request, reply);
  }
  v1::BeginPublishReply Begin(const TestEngine& engine, const std::vector<uint32_t>& tokens) {
    v1::BeginPublishRequest request;
    *request.mutable_session() = engine.session();
    request.set_tokens(Packed(tokens));
    v1::BeginPublishReply reply;
    const grpc::Status status = stub_->BeginPublish(Soon().get(), request, &reply);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return reply;
  }
  // The BF16 rows of every page that is missing in either encoding, and the commit that names them.
  v1::CommitPublishRequest Prepare(const TestEngine& engine,
                                   const v1::BeginPublishReply& plan,
                                   std::vector<std::byte>* staging) const {
    v1::CommitPublishRequest request;
    *request.mutable_session() = engine.session();
    request.set_publish_id(plan.publish_id());
    std::vector<uint32_t> pages(plan.int2_missing().begin(), plan.int2_missing().end());
    pages.insert(pages.end(), plan.bf16_missing().begin(), plan.bf16_missing().end());
    std::sort(pages.begin(), pages.end());
    pages.erase(std::unique(pages.begin(), pages.end()), pages.end());
    const Geometry& geometry = profile_->geometry();
    for (const uint32_t page : pages) {
      v1::StagedPage& staged = *request.add_staged();
      staged.set_page_idx(page);
      staged.set_encoding(v1::ENCODING_BF16);
      staged.set_staging_offset(staging->size());
      const std::vector<BFloat16> rows = Rows(page);
      const auto bytes = std::as_bytes(std::span(rows));
      const size_t head_bytes = geometry.HeadRangeBytes(PageEncoding::kBf16);
      for (uint32_t head = 0; head < geometry.num_kv_heads; ++head) {
        staged.add_head_crc32c(Crc32c(bytes.subspan(head * head_bytes, head_bytes)));
      }
      staging->insert(staging->end(), bytes.begin(), bytes.end());
    }
    return request;
  }
  // As Prepare, and hands them over in a memfd.
  v1::CommitPublishRequest Stage(TestEngine& engine, const v1::BeginPublishReply& plan) const {
    std::vector<std::byte> staging;
    v1::CommitPublishRequest request = Prepare(engine, plan, &staging);
    engine.GiveStaging(staging);
    return request;
  }
  grpc::Status Commit(const v1::CommitPublishRequest& request,
                      v1::CommitPublishReply* reply = nullptr) {
    v1::CommitPublishReply unused;
    return stub_->CommitPublish(Soon().get(), request, reply != nullptr ? reply : &unused);
  }

  const std::shared_ptr<const Profile> profile_ = MakeTestProfile();
  const std::filesystem::path directory_ =
      std::filesystem::path(testing::TempDir()) / absl::StrCat("rpc_test.", getpid());
  std::unique_ptr<Server> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Cache::Stub> stub_;

 private:
  // The image of a page: small numbers that differ.
  std::vector<BFloat16> Rows(uint32_t page) const {
    std::vector<BFloat16> rows(profile_->geometry().PageBytes(PageEncoding::kBf16) /
                               sizeof(BFloat16));
    for (size_t i = 0; i < rows.size(); ++i) {
      rows[i] = BFloat16::FromFloat(static_cast<float>((i * 7 + page) % 31) - 15);
    }
    return rows;
  }
};

}  // namespace crumb
