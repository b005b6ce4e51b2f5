// SPDX-License-Identifier: Apache-2.0
#include "proto/base/ids.h"

#include <gtest/gtest.h>

#include <type_traits>
#include <unordered_set>

#include "absl/container/flat_hash_set.h"

namespace crumb {
namespace {

// One kind of id cannot stand in for another, nor for a number.
static_assert(!std::is_convertible_v<SessionId, LeaseId>);
static_assert(!std::is_convertible_v<uint64_t, LeaseId>);
static_assert(!std::is_convertible_v<LeaseId, uint64_t>);
static_assert(!std::is_assignable_v<ProfileId&, NamespaceId>);
static_assert(sizeof(PageIdx) == 4 && sizeof(LeaseId) == 8);

TEST(StrongIdTest, ComparesAndHashesByValue) {
  EXPECT_EQ(LeaseId(3), LeaseId(3));
  EXPECT_LT(LeaseId(3), LeaseId(4));
  EXPECT_EQ(LeaseId(), LeaseId(0));
  const absl::flat_hash_set<LeaseId> leases = {LeaseId(1), LeaseId(2), LeaseId(1)};
  EXPECT_EQ(leases.size(), 2U);
  const std::unordered_set<PageIdx> pages = {PageIdx(1), PageIdx(2), PageIdx(1)};
  EXPECT_EQ(pages.size(), 2U);
}

TEST(DigestTest, HexIsTwoDigitsAByteInOrder) {
  Digest digest;
  for (size_t i = 0; i < Digest::kBytes; ++i) {
    digest.bytes[i] = static_cast<uint8_t>(i * 9);
  }
  EXPECT_EQ(digest.Hex(), "0009121b242d363f48515a636c757e879099a2abb4bdc6cfd8e1eaf3fc050e17");
  EXPECT_EQ(digest.Short(), "0009121b242d");
}

TEST(DigestTest, EachByteCounts) {
  absl::flat_hash_set<Digest> digests = {Digest()};
  for (size_t i = 0; i < Digest::kBytes; ++i) {
    Digest digest;
    digest.bytes[i] = 1;
    EXPECT_NE(digest, Digest());
    digests.insert(digest);
  }
  EXPECT_EQ(digests.size(), Digest::kBytes + 1);
}

}  // namespace
}  // namespace crumb
