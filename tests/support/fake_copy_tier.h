// SPDX-License-Identifier: Apache-2.0
//
// A tier of copies in host memory, a memfd a segment, that can be told to fail. For tests.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

#include "daemon/tier/copy_tier.h"
#include "proto/base/crc32c.h"

namespace crumb {

// Confined to the thread of the test, but for Hold.
class FakeCopyTier : public CopyTier {
 public:
  FakeCopyTier(size_t segment_bytes, uint32_t num_segments)
      : segment_bytes_(segment_bytes), segments_(num_segments) {
    for (uint32_t segment = 0; segment < num_segments; ++segment) {
      Make(segment);
    }
  }
  ~FakeCopyTier() override {
    for (Segment& segment : segments_) {
      ::munmap(segment.memory, segment_bytes_);
    }
  }
  FakeCopyTier(const FakeCopyTier&) = delete;
  FakeCopyTier& operator=(const FakeCopyTier&) = delete;

  std::string Description() const override { return "fake device"; }
  size_t segment_bytes() const override { return segment_bytes_; }
  uint32_t num_segments() const override { return static_cast<uint32_t>(segments_.size()); }
  absl::Status CheckGeometry(const Geometry& geometry) const override {
    return geometry.key_dim == refused_key_dim
               ? absl::UnimplementedError("head_dim that the fake device refuses")
               : absl::OkStatus();
  }
  absl::StatusOr<UniqueFd> Share(uint32_t segment) const override {
    return UniqueFd(::dup(segments_[segment].memfd.get()));
  }
  std::shared_ptr<const void> Hold(std::span<const std::byte> memory) const override {
    if (refuses_to_hold) {
      return nullptr;
    }
    ++num_holds;
    return {memory.data(), [this](const std::byte*) { --num_holds; }};
  }
  absl::Status Renew(uint32_t segment) override {
    if (out_of_memory) {
      return absl::ResourceExhaustedError("fake device is out of memory");
    }
    ::munmap(segments_[segment].memory, segment_bytes_);
    Make(segment);
    return absl::OkStatus();
  }
  std::vector<absl::Status> Write(std::span<const PageCopy> copies) override {
    std::vector<absl::Status> results;
    for (const PageCopy& copy : copies) {
      results.push_back(WriteOne(copy));
    }
    return results;
  }

  // As a device writes that demotes into the tier.
  void Put(const CopyPlace& place, std::span<const std::byte> bytes) {
    if (place.offset + bytes.size() > segment_bytes_) {
      std::abort();
    }
    std::memcpy(segments_[place.segment].memory + place.offset, bytes.data(), bytes.size());
  }
  std::span<const std::byte> bytes(uint32_t segment) const {
    return {segments_[segment].memory, segment_bytes_};
  }

  bool out_of_memory = false;
  bool refuses_to_hold = false;
  mutable std::atomic<int> num_holds = 0;  // That are alive.
  bool flips_a_bit = false;                // Of what is written.
  uint32_t refused_key_dim = 0;

 private:
  struct Segment {
    UniqueFd memfd;
    std::byte* memory = nullptr;
  };

  void Make(uint32_t segment) {
    Segment& made = segments_[segment];
    made.memfd.reset(::memfd_create("fake-device", MFD_CLOEXEC));
    if (::ftruncate(made.memfd.get(), static_cast<off_t>(segment_bytes_)) != 0) {
      std::abort();
    }
    made.memory = static_cast<std::byte*>(
        ::mmap(nullptr, segment_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, made.memfd.get(), 0));
  }
  absl::Status WriteOne(const PageCopy& copy) {
    std::byte* const target = segments_[copy.place.segment].memory + copy.place.offset;
    if (copy.place.offset + copy.source.size() > segment_bytes_) {
      return absl::InternalError("beyond the segment");
    }
    std::memcpy(target, copy.source.data(), copy.source.size());
    if (flips_a_bit) {
      target[0] ^= std::byte{1};
    }
    const size_t range = copy.source.size() / copy.head_crc32c.size();
    for (size_t i = 0; i < copy.head_crc32c.size(); ++i) {
      if (Crc32c({target + i * range, range}) != copy.head_crc32c[i]) {
        return absl::DataLossError(absl::StrCat("head ", i, " arrived with another checksum"));
      }
    }
    return absl::OkStatus();
  }

  const size_t segment_bytes_;
  std::vector<Segment> segments_;
};

// Copies all that is wanted and can be placed, as the daemon's thread does. Returns how many
// blocks have arrived.
template <typename Store>
size_t CopyAll(Store* store, FakeCopyTier* tier) {
  size_t arrived = 0;
  for (int idle = 0; idle < 2;) {
    for (const uint32_t segment : store->TakeSpentSegments()) {
      if (tier->Renew(segment).ok()) {
        store->ReturnSegment(segment);
      }
    }
    auto batch = store->BeginCopies(size_t{64} << 10);
    const auto results = tier->Write(batch.copies());
    for (size_t i = 0; i < results.size(); ++i) {
      if (results[i].ok()) {
        batch.SetArrived(i);
        ++arrived;
      }
    }
    idle = results.empty() ? idle + 1 : 0;
  }
  return arrived;
}

}  // namespace crumb
