// SPDX-License-Identifier: Apache-2.0
#include "client/transport/staging_buffer.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

#include "proto/base/huge_page.h"

namespace crumb {
namespace {

absl::Status Failed(const char* what, size_t bytes) {
  return absl::ResourceExhaustedError(
      absl::StrCat("staging memory of ", bytes, " bytes: ", what, ": ",
                   std::strerror(errno),  // NOLINT(concurrency-mt-unsafe)
                   "; raise the memory limit, or publish shorter prefixes"));
}

}  // namespace

absl::StatusOr<StagingBuffer> StagingBuffer::Create(size_t bytes) {
  StagingBuffer buffer;
  buffer.memfd_.reset(::memfd_create("crumb-staging", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!buffer.memfd_.is_valid()) {
    return Failed("memfd_create", bytes);
  }
  if (::ftruncate(buffer.memfd(), static_cast<off_t>(bytes)) != 0) {
    return Failed("ftruncate", bytes);
  }
  if (::fcntl(buffer.memfd(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return Failed("fcntl(F_ADD_SEALS)", bytes);
  }
  void* base = MapAtHugePage(buffer.memfd(), bytes, PROT_READ | PROT_WRITE);
  if (base == MAP_FAILED) {
    return Failed("mmap", bytes);
  }
  buffer.bytes_ = {static_cast<std::byte*>(base), bytes};
  return buffer;
}

void StagingBuffer::Touch(size_t end) {
  AskForHugePages(bytes_, bytes_.subspan(touched_bytes_, end - touched_bytes_));
  touched_bytes_ = end;
}

StagingBuffer::StagingBuffer(StagingBuffer&& other) noexcept
    : memfd_(std::move(other.memfd_)),
      bytes_(std::exchange(other.bytes_, {})),
      touched_bytes_(std::exchange(other.touched_bytes_, 0)) {}

StagingBuffer& StagingBuffer::operator=(StagingBuffer&& other) noexcept {
  std::swap(memfd_, other.memfd_);
  std::swap(bytes_, other.bytes_);
  std::swap(touched_bytes_, other.touched_bytes_);
  return *this;
}

StagingBuffer::~StagingBuffer() {
  if (!bytes_.empty()) {
    ::munmap(bytes_.data(), bytes_.size());
  }
}

}  // namespace crumb
