// SPDX-License-Identifier: Apache-2.0
#include "tests/support/fake_gpu.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"

#include "crumb/cuda/device.h"
#include "crumb/cuda/shared_memory.h"
#include "crumb/cuda/transfer.h"
#include "proto/base/check.h"
#include "proto/base/status_macros.h"

namespace crumb {
namespace {

constexpr uint64_t kNever = std::numeric_limits<uint64_t>::max();

struct Device {
  std::deque<FakeGpu::Work> waiting;
  uint64_t num_enqueued = 0;
  uint64_t num_done = 0;
  std::vector<FakeGpu::Work>* capture = nullptr;
  uint64_t calls_left = kNever;
  bool has_failed = false;
  // By address.
  std::map<const std::byte*, size_t> memory;
  std::map<const std::byte*, size_t> pinned;
};

Device& TheDevice() {
  static auto* device = new Device;
  return *device;
}

void RunUntil(uint64_t end) {
  Device& device = TheDevice();
  CRUMB_CHECK(device.capture == nullptr, "nothing waits in a capture");
  while (device.num_done < end) {
    const FakeGpu::Work work = std::move(device.waiting.front());
    device.waiting.pop_front();
    ++device.num_done;
    work();
  }
}

// By event: the work that it stands behind.
std::map<const OwnGpuEvent*, uint64_t>& Tickets() {
  static auto* tickets = new std::map<const OwnGpuEvent*, uint64_t>;
  return *tickets;
}

std::byte* Allocate(size_t bytes, std::map<const std::byte*, size_t>* of) {
  auto* const data = static_cast<std::byte*>(::operator new (bytes, std::align_val_t{256}));
  std::fill_n(data, bytes, std::byte{0xff});
  (*of)[data] = bytes;
  return data;
}

void Free(std::byte* data, std::map<const std::byte*, size_t>* of) {
  if (data != nullptr) {
    of->erase(data);
    ::operator delete (data, std::align_val_t{256});
  }
}

}  // namespace

void FakeGpu::FailCall(uint64_t nth) {
  TheDevice().calls_left = nth;
  TheDevice().has_failed = false;
}

bool FakeGpu::TakeFailed() {
  TheDevice().calls_left = kNever;
  return std::exchange(TheDevice().has_failed, false);
}

size_t FakeGpu::allocated_bytes() {
  size_t bytes = 0;
  for (const auto* of : {&TheDevice().memory, &TheDevice().pinned}) {
    for (const auto& [data, size] : *of) {
      bytes += size;
    }
  }
  return bytes;
}

size_t FakeGpu::num_waiting() {
  return TheDevice().waiting.size();
}

void FakeGpu::Finish() {
  RunUntil(TheDevice().num_enqueued);
}

uint64_t FakeGpu::FailEachCall(const std::function<absl::Status()>& action,
                               const std::function<void(const absl::Status&)>& then) {
  for (uint64_t nth = 0;; ++nth) {
    FailCall(nth);
    const absl::Status status = action();
    const bool has_failed = TakeFailed();
    then(status);
    if (!has_failed) {
      return nth;
    }
  }
}

absl::Status FakeGpu::Call(const char* what) {
  Device& device = TheDevice();
  if (device.calls_left == kNever || device.calls_left-- > 0) {
    return absl::OkStatus();
  }
  device.calls_left = kNever;
  device.has_failed = true;
  return absl::ResourceExhaustedError(absl::StrCat(what, ": the pretended GPU has no memory"));
}

absl::Status FakeGpu::Enqueue(const char* what, Work work) {
  CRUMB_RETURN_IF_ERROR(Call(what));
  Device& device = TheDevice();
  if (device.capture != nullptr) {
    device.capture->push_back(std::move(work));
  } else {
    device.waiting.push_back(std::move(work));
    ++device.num_enqueued;
  }
  return absl::OkStatus();
}

void FakeGpu::Capture(std::vector<Work>* into) {
  TheDevice().capture = into;
}

absl::StatusOr<GpuDevice> CurrentGpu() {
  return GpuDevice{.index = 0, .name = "pretended", .major = 9};
}

absl::Status CheckStream(GpuStream /*stream*/) {
  return absl::OkStatus();  // There is one queue.
}

ScopedGpu::ScopedGpu(int device) : status_(FakeGpu::Call("making a GPU the current one")) {
  if (device != 0) {
    status_ = absl::InvalidArgumentError(absl::StrCat("GPU ", device, " is not there"));
  }
}
ScopedGpu::~ScopedGpu() = default;

absl::StatusOr<std::unique_ptr<OwnGpuStream>> OwnGpuStream::Create() {
  CRUMB_RETURN_IF_ERROR(FakeGpu::Call("making a stream"));
  return std::unique_ptr<OwnGpuStream>(new OwnGpuStream);
}
OwnGpuStream::~OwnGpuStream() = default;
absl::Status OwnGpuStream::Wait() const {
  FakeGpu::Finish();
  return FakeGpu::Call("waiting for a stream");
}

absl::StatusOr<std::unique_ptr<OwnGpuEvent>> OwnGpuEvent::Create() {
  CRUMB_RETURN_IF_ERROR(FakeGpu::Call("making an event"));
  return std::unique_ptr<OwnGpuEvent>(new OwnGpuEvent);
}
OwnGpuEvent::~OwnGpuEvent() {
  Tickets().erase(this);
}
absl::Status OwnGpuEvent::Record(GpuStream /*stream*/) {
  CRUMB_RETURN_IF_ERROR(FakeGpu::Call("recording an event"));
  Tickets()[this] = TheDevice().num_enqueued;
  return absl::OkStatus();
}
absl::Status OwnGpuEvent::Delay(GpuStream /*stream*/) const {
  return FakeGpu::Call("having a stream wait for an event");  // There is one queue.
}
absl::Status OwnGpuEvent::Wait() const {
  const auto found = Tickets().find(this);
  RunUntil(found == Tickets().end() ? 0 : found->second);
  return FakeGpu::Call("waiting for an event");
}

absl::StatusOr<std::unique_ptr<OwnGpuMemory>> OwnGpuMemory::Create(size_t bytes) {
  CRUMB_RETURN_IF_ERROR(FakeGpu::Call("allocating a GPU's memory"));
  std::unique_ptr<OwnGpuMemory> memory(new OwnGpuMemory);
  memory->data_ = Allocate(bytes, &TheDevice().memory);
  memory->bytes_ = bytes;
  return memory;
}
// As cudaFree: what is under way ends first.
OwnGpuMemory::~OwnGpuMemory() {
  FakeGpu::Finish();
  Free(data_, &TheDevice().memory);
}

absl::StatusOr<std::unique_ptr<OwnPinnedMemory>> OwnPinnedMemory::Create(size_t bytes) {
  CRUMB_RETURN_IF_ERROR(FakeGpu::Call("allocating pinned memory"));
  std::unique_ptr<OwnPinnedMemory> memory(new OwnPinnedMemory);
  memory->data_ = Allocate(bytes, &TheDevice().pinned);
  memory->bytes_ = bytes;
  return memory;
}
OwnPinnedMemory::~OwnPinnedMemory() {
  FakeGpu::Finish();
  Free(data_, &TheDevice().pinned);
}

absl::StatusOr<std::unique_ptr<HostRegistration>> HostRegistration::Create(
    std::span<const std::byte> memory, bool /*is_read_only*/) {
  CRUMB_RETURN_IF_ERROR(FakeGpu::Call("registering host memory"));
  std::unique_ptr<HostRegistration> registration(new HostRegistration);
  registration->memory_ = memory.data();
  return registration;
}
HostRegistration::~HostRegistration() = default;

absl::Status CheckIsGpuMemory(const std::byte* data, size_t bytes) {
  const auto& memory = TheDevice().memory;
  auto from = memory.upper_bound(data);
  if (from == memory.begin() || (--from)->first + from->second < data + bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("address ", reinterpret_cast<uintptr_t>(data), " is in no memory of a GPU"));
  }
  return absl::OkStatus();
}

absl::Status CopyToGpu(std::byte* target, std::span<const std::byte> source, GpuStream) {
  return FakeGpu::Enqueue("copying to a GPU",
                          [=] { std::copy(source.begin(), source.end(), target); });
}
absl::Status CopyFromGpu(std::span<std::byte> target, const std::byte* source, GpuStream) {
  return FakeGpu::Enqueue("copying from a GPU",
                          [=] { std::copy_n(source, target.size(), target.begin()); });
}
absl::Status ClearGpu(std::byte* target, size_t bytes, GpuStream) {
  return FakeGpu::Enqueue("clearing a GPU's memory",
                          [=] { std::fill_n(target, bytes, std::byte{0}); });
}
absl::Status CopyRowsToGpu(const GpuRowCopy& copy, GpuStream) {
  return FakeGpu::Enqueue("copying rows to a GPU", [=] {
    for (size_t row = 0; row < copy.rows; ++row) {
      std::copy_n(copy.source + row * copy.source_stride, copy.row_bytes,
                  copy.target + row * copy.target_stride);
    }
  });
}

absl::StatusOr<GpuUuid> GetGpuUuid(int /*device*/) {
  return GpuUuid{1, 2, 3};
}

// A memfd, mapped.
absl::StatusOr<std::unique_ptr<SharedGpuMemory>> SharedGpuMemory::Create(int device, size_t bytes) {
  CRUMB_RETURN_IF_ERROR(FakeGpu::Call("allocating a GPU's memory to be shared"));
  UniqueFd fd(::memfd_create("pretended-gpu", MFD_CLOEXEC));
  CRUMB_CHECK(fd.is_valid() && ::ftruncate(fd.get(), static_cast<off_t>(bytes)) == 0, "a memfd");
  auto memory = Open(device, fd.get(), bytes);
  if (memory.ok()) {
    (*memory)->fd_ = std::move(fd);
  }
  return memory;
}
absl::StatusOr<std::unique_ptr<SharedGpuMemory>> SharedGpuMemory::Open(int /*device*/,
                                                                       int fd,
                                                                       size_t bytes) {
  CRUMB_RETURN_IF_ERROR(FakeGpu::Call("mapping a GPU's memory"));
  struct stat status {};
  if (::fstat(fd, &status) != 0 || static_cast<size_t>(status.st_size) < bytes) {
    return absl::FailedPreconditionError(absl::StrCat("descriptor ", fd, " is not one of ours"));
  }
  void* const data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  CRUMB_CHECK(data != MAP_FAILED, "a memfd can be mapped");
  std::unique_ptr<SharedGpuMemory> memory(new SharedGpuMemory);
  memory->data_ = static_cast<std::byte*>(data);
  memory->bytes_ = bytes;
  TheDevice().memory[memory->data_] = bytes;
  return memory;
}
// As cuMemUnmap, which waits for nothing.
SharedGpuMemory::~SharedGpuMemory() {
  CRUMB_CHECK(FakeGpu::num_waiting() == 0, "memory is unmapped while work may use it");
  if (data_ != nullptr) {
    TheDevice().memory.erase(data_);
    ::munmap(data_, bytes_);
  }
}

}  // namespace crumb
