// SPDX-License-Identifier: Apache-2.0
#include "bench/client/foreign_memory.h"

#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>

#include "absl/time/clock.h"

#include "proto/base/check.h"

namespace crumb::bench {
namespace {

constexpr size_t kCallBytes = size_t{512} << 10;  // As UCX does: UCX_CMA_SEG_SIZE.

std::byte* MapWritten(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  CRUMB_CHECK(memory != MAP_FAILED, "memory for the limit");
  madvise(memory, bytes, MADV_HUGEPAGE);
  std::memset(memory, 1, bytes);
  return static_cast<std::byte*>(memory);
}

}  // namespace

ForeignMemory::ForeignMemory(size_t bytes) : bytes_(bytes) {
  // Neither side has memory of before the fork in what is measured: Linux would unshare it, in
  // small pages, as it is read and written.
  int ready[2];
  CRUMB_CHECK(pipe(ready) == 0, "a pipe");
  child_ = fork();
  CRUMB_CHECK(child_ >= 0, "a process that holds memory");
  if (child_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    std::byte* const source = MapWritten(bytes);
    CRUMB_CHECK(write(ready[1], &source, sizeof(source)) == sizeof(source), "the parent waits");
    while (true) {
      pause();
    }
  }
  target_ = MapWritten(bytes);
  CRUMB_CHECK(read(ready[0], &source_, sizeof(source_)) == sizeof(source_), "the child has memory");
  close(ready[0]);
  close(ready[1]);
}

ForeignMemory::~ForeignMemory() {
  kill(child_, SIGKILL);
  waitpid(child_, nullptr, 0);
  munmap(target_, bytes_);
}

double ForeignMemory::Read(size_t bytes, size_t window) {
  const absl::Time start = absl::Now();
  for (size_t at = 0; at < bytes; at += kCallBytes) {
    const size_t place = at % window;
    const size_t size = std::min({kCallBytes, bytes - at, window - place});
    const iovec target{target_ + place, size};
    const iovec source{source_ + place, size};
    CRUMB_CHECK(process_vm_readv(child_, &target, 1, &source, 1, 0) == static_cast<ssize_t>(size),
                "our child's memory can be read");
  }
  return static_cast<double>(bytes) / absl::ToDoubleNanoseconds(absl::Now() - start);
}

double ForeignMemory::ReadCold() {
  return Read(bytes_, bytes_);
}

double ForeignMemory::ReadHot(size_t bytes) {
  const size_t window = std::max<size_t>(1, bytes / kCallBytes) * kCallBytes;
  return Read(bytes_ / kCallBytes * kCallBytes, std::min(window, bytes_));
}

}  // namespace crumb::bench
