// SPDX-License-Identifier: Apache-2.0
#include "tests/client/transport/fake_arena.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"

#include "proto/base/check.h"
#include "proto/page/namespace_id.h"

namespace crumb {
namespace {

std::string NewSocketPath() {
  static std::atomic<int> count{0};
  const char* folder = ::getenv("TMPDIR");  // NOLINT(concurrency-mt-unsafe)
  return absl::StrCat(folder == nullptr ? "/tmp" : folder, "/crumb-fake-", ::getpid(), "-", count++,
                      ".sock");
}

}  // namespace

FakeArena::FakeArena(std::shared_ptr<const Profile> profile)
    : profile_(std::move(profile)),
      namespace_id_(ComputeNamespaceId("default", profile_->id(), "")),
      path_(NewSocketPath()),
      listener_(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  CRUMB_CHECK(path_.size() < sizeof(address.sun_path), "TMPDIR is too long for a socket");
  std::memcpy(address.sun_path, path_.data(), path_.size());
  CRUMB_CHECK(
      ::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0,
      "bind");
  CRUMB_CHECK(::listen(listener_.get(), 16) == 0, "listen");
  thread_ = std::thread([this] { Serve(); });
}

FakeArena::~FakeArena() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  ::eventfd_write(wake_.get(), 1);
  thread_.join();
  ::unlink(path_.c_str());
  absl::MutexLock lock(&mutex_);
  for (auto& [id, chunk] : chunks_) {
    ::munmap(chunk.base, chunk.layout.total_bytes());
  }
}

SessionInfo FakeArena::session() const {
  SessionInfo info;
  info.id = SessionId(7);
  info.secret.fill(0xab);
  info.epoch = 1;
  info.memory_socket = path_;
  info.profile = profile_;
  info.heads = {0, profile_->geometry().num_kv_heads};
  return info;
}

ChunkId FakeArena::AddChunk(PageEncoding encoding, uint32_t num_blocks, bool sealed) {
  const Geometry& geometry = profile_->geometry();
  Chunk chunk;
  chunk.encoding = encoding;
  chunk.layout = {.image_bytes = geometry.PageBytes(encoding), .num_blocks = num_blocks};
  const size_t bytes = chunk.layout.total_bytes();
  chunk.memfd.reset(::memfd_create("crumb-fake", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  CRUMB_CHECK(::ftruncate(chunk.memfd.get(), static_cast<off_t>(bytes)) == 0, "ftruncate");
  chunk.base = static_cast<std::byte*>(
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, chunk.memfd.get(), 0));
  CRUMB_CHECK(chunk.base != MAP_FAILED, "mmap");
  if (sealed) {
    // As the daemon does: from now on no new mapping can write.
    ::fcntl(chunk.memfd.get(), F_ADD_SEALS,
            F_SEAL_FUTURE_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  }
  absl::MutexLock lock(&mutex_);
  const auto id = static_cast<uint32_t>(chunks_.size() + 1);
  std::mt19937 random(id);
  for (uint32_t block = 0; block < num_blocks; ++block) {
    const std::span<std::byte> image(chunk.base + chunk.layout.block_offset(block),
                                     chunk.layout.image_bytes);
    std::generate(image.begin(), image.end(), [&] { return static_cast<std::byte>(random()); });
    PageHeader header;
    header.encoding = encoding;
    header.generation = 2;
    header.first_token = block * kPageTokens;
    header.valid_tokens = kPageTokens;
    header.heads_present = HeadRange{0, geometry.num_kv_heads}.Mask();
    header.profile_id = profile_->id().bytes;
    header.namespace_id = namespace_id_.bytes;
    header.head_crc32c = HeadChecksums(geometry, encoding, header.heads_present, image);
    std::memcpy(chunk.base + ChunkLayout::header_offset(block), &header, sizeof(header));
  }
  chunks_.emplace(id, std::move(chunk));
  return ChunkId(id);
}

LeasedPrefix FakeArena::PrefixIn(ChunkId id) const {
  absl::MutexLock lock(&mutex_);
  const Chunk& chunk = chunks_.at(id.value());
  LeasedPrefix prefix{.lease = LeaseId(1), .namespace_id = namespace_id_, .pages = {}};
  for (uint32_t block = 0; block < chunk.layout.num_blocks; ++block) {
    const BlockPlace place{.chunk = id, .block = block, .generation = Generation(2)};
    PagePlaces places;
    (chunk.encoding == PageEncoding::kInt2 ? places.int2 : places.bf16) = place;
    prefix.pages.push_back(places);
  }
  return prefix;
}

void FakeArena::AddCopies(ChunkId id, uint64_t bytes) {
  absl::MutexLock lock(&mutex_);
  Chunk& chunk = chunks_.at(id.value());
  const size_t stride = chunk.layout.block_stride();
  const size_t all = chunk.layout.num_blocks * stride;
  chunk.copies_bytes = bytes == 0 ? all : bytes;
  chunk.copies.reset(::memfd_create("crumb-fake-copies", MFD_CLOEXEC));
  CRUMB_CHECK(::ftruncate(chunk.copies.get(), static_cast<off_t>(all)) == 0, "ftruncate");
  for (uint32_t block = 0; block < chunk.layout.num_blocks; ++block) {
    CRUMB_CHECK(::pwrite(chunk.copies.get(), chunk.base + chunk.layout.block_offset(block),
                         chunk.layout.image_bytes, static_cast<off_t>(block * stride)) ==
                    static_cast<ssize_t>(chunk.layout.image_bytes),
                "pwrite");
  }
}

PageHeader& FakeArena::header(ChunkId id, uint32_t block) {
  absl::MutexLock lock(&mutex_);
  return *reinterpret_cast<PageHeader*>(chunks_.at(id.value()).base +
                                        ChunkLayout::header_offset(block));
}

std::span<std::byte> FakeArena::image(ChunkId id, uint32_t block) {
  absl::MutexLock lock(&mutex_);
  const Chunk& chunk = chunks_.at(id.value());
  return {chunk.base + chunk.layout.block_offset(block), chunk.layout.image_bytes};
}

void FakeArena::SetMood(Mood mood) {
  absl::MutexLock lock(&mutex_);
  mood_ = mood;
}

void FakeArena::SetStatus(absl::Status status) {
  absl::MutexLock lock(&mutex_);
  status_ = std::move(status);
}

void FakeArena::SetListed(std::vector<ListedChunk> listed) {
  absl::MutexLock lock(&mutex_);
  listed_ = std::move(listed);
}

void FakeArena::CloseConnections() {
  absl::MutexLock lock(&mutex_);
  close_all_ = true;
  ::eventfd_write(wake_.get(), 1);
  const auto done = [this] {
    mutex_.AssertReaderHeld();
    return !close_all_;
  };
  mutex_.Await(absl::Condition(&done));
}

int FakeArena::num_requests() const {
  absl::MutexLock lock(&mutex_);
  return num_requests_;
}

UniqueFd FakeArena::TakeStaging() {
  absl::MutexLock lock(&mutex_);
  return std::move(staging_);
}

uint64_t FakeArena::staging_bytes() const {
  absl::MutexLock lock(&mutex_);
  return staging_bytes_;
}

void FakeArena::Serve() {
  std::vector<UniqueFd> connections;
  for (;;) {
    std::vector<pollfd> polls = {{wake_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
    for (const UniqueFd& connection : connections) {
      polls.push_back({connection.get(), POLLIN, 0});
    }
    ::poll(polls.data(), polls.size(), -1);
    if (eventfd_t count = 0; polls[0].revents != 0 && ::eventfd_read(wake_.get(), &count) == 0) {
      absl::MutexLock lock(&mutex_);
      if (stopping_) {
        return;
      }
      connections.clear();
      close_all_ = false;
      continue;
    }
    for (size_t i = connections.size(); i > 0; --i) {
      if (polls[i + 1].revents != 0 && !Answer(connections[i - 1].get())) {
        connections.erase(connections.begin() + static_cast<ptrdiff_t>(i - 1));
      }
    }
    if (polls[1].revents != 0) {
      connections.emplace_back(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    }
  }
}

bool FakeArena::Answer(int connection) {
  MemoryRequest request;
  iovec io{.iov_base = &request, .iov_len = sizeof(request)};
  alignas(cmsghdr) char control[CMSG_SPACE(2 * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &io;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  if (::recvmsg(connection, &message, MSG_CMSG_CLOEXEC) != sizeof(request)) {
    return false;
  }
  absl::MutexLock lock(&mutex_);
  ++num_requests_;
  if (const cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr) {
    int memfd = -1;
    std::memcpy(&memfd, CMSG_DATA(header), sizeof(int));
    staging_.reset(memfd);
    staging_bytes_ = request.argument;
  }
  if (mood_ == Mood::kSilent || mood_ == Mood::kHangUp) {
    return mood_ == Mood::kSilent;
  }
  MemoryReply reply;
  reply.version = mood_ == Mood::kOtherVersion ? 99 : kMemorySocketVersion;
  reply.status_code = static_cast<uint16_t>(status_.code());
  std::copy_n(status_.message().begin(), status_.message().size(), reply.message.begin());
  if (request.op == MemoryOp::kListChunks && status_.ok()) {
    for (const ListedChunk& listed : listed_) {
      if ((request.argument == 0 || listed.id < request.argument) &&
          reply.num_blocks < kMaxListedChunks) {
        std::memcpy(reply.message.data() + reply.num_blocks++ * sizeof(listed), &listed,
                    sizeof(listed));
      }
    }
  }
  const auto chunk = chunks_.find(static_cast<uint32_t>(request.argument));
  std::vector<int> given;
  if (status_.ok() && chunk != chunks_.end()) {
    const Chunk& found = chunk->second;
    if (request.op == MemoryOp::kGetChunk) {
      given = {found.memfd.get()};
      reply.bytes = found.layout.total_bytes();
    } else if (request.op == MemoryOp::kGetCopyChunk && found.copies.is_valid()) {
      given = {found.memfd.get(), found.copies.get()};
      reply.bytes = found.copies_bytes;
    }
    reply.num_blocks = given.empty() ? reply.num_blocks : found.layout.num_blocks;
  }
  io = {.iov_base = &reply, .iov_len = sizeof(reply)};
  message = {};
  message.msg_iov = &io;
  message.msg_iovlen = 1;
  if (!given.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(given.size() * sizeof(int));
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(given.size() * sizeof(int));
    std::memcpy(CMSG_DATA(header), given.data(), given.size() * sizeof(int));
  }
  return ::sendmsg(connection, &message, MSG_NOSIGNAL) > 0;
}

}  // namespace crumb
