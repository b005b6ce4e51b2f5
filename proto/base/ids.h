// SPDX-License-Identifier: Apache-2.0
//
// The identifiers that cross module boundaries, each a type of its own so that one cannot stand
// in for another. All are values, compare by content and hash with absl and std containers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>

namespace crumb {

// A number that means one thing. `Tag` is never defined; it only separates the types.
template <typename Tag, typename Rep = uint64_t>
class StrongId {
 public:
  constexpr StrongId() = default;
  constexpr explicit StrongId(Rep value) : value_(value) {}

  constexpr Rep value() const { return value_; }
  friend constexpr auto operator<=>(StrongId, StrongId) = default;  // NOLINT: tidy misreads <=>.
  template <typename H>
  friend H AbslHashValue(H state, StrongId id) {
    return H::combine(std::move(state), id.value_);
  }

 private:
  Rep value_ = 0;
};

// One attached engine rank. Unique within a daemon epoch; never reused. 0 is no session.
using SessionId = StrongId<struct SessionTag>;
// The right of one session to read a set of pages. Unique within a daemon epoch. 0 is no lease.
using LeaseId = StrongId<struct LeaseTag>;
// One publish between Begin and Commit or Abort. Unique within a daemon epoch.
using PublishId = StrongId<struct PublishTag>;
// One memfd of the daemon's arena. Never reused within an epoch, so a mapping never changes owner.
using ChunkId = StrongId<struct ChunkTag, uint32_t>;
// Counts the uses of one block of a chunk; moves on before the block's bytes may change.
using Generation = StrongId<struct GenerationTag>;
// Index of a page in its prefix: tokens [64 * idx, 64 * idx + 64).
using PageIdx = StrongId<struct PageIdxTag, uint32_t>;

// 256 bits of SHA-256 that name a thing by its content. All zero is no digest.
struct Digest {
  static constexpr size_t kBytes = 32;
  std::array<uint8_t, kBytes> bytes{};
  // NOLINTNEXTLINE(modernize-use-nullptr): clang-tidy 14 misreads a defaulted <=>.
  friend constexpr auto operator<=>(const Digest&, const Digest&) = default;
  template <typename H>
  friend H AbslHashValue(H state, const Digest& digest) {
    return H::combine(std::move(state), digest.bytes);
  }
  // Lower-case hexadecimal, 64 characters. `Short` gives the first 12, for people.
  std::string Hex() const {
    static constexpr char kDigits[] = "0123456789abcdef";
    std::string text;
    text.reserve(2 * kBytes);
    for (const uint8_t byte : bytes) {
      text.push_back(kDigits[byte >> 4]);
      text.push_back(kDigits[byte & 15]);
    }
    return text;
  }
  std::string Short() const { return Hex().substr(0, 12); }
};

// Names a model profile: SHA-256 of the profile file. Two engines whose profiles differ in any bit
// never share a page.
struct ProfileId : Digest {};
// Names a namespace: SHA-256 over (tenant, profile id, context key). See page/namespace_id.h.
struct NamespaceId : Digest {};

}  // namespace crumb

template <typename Tag, typename Rep>
struct std::hash<crumb::StrongId<Tag, Rep>> {
  size_t operator()(crumb::StrongId<Tag, Rep> id) const noexcept {
    return std::hash<Rep>()(id.value());
  }
};
