// SPDX-License-Identifier: Apache-2.0
#include "daemon/tier/populate.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "gtest/gtest.h"

#include "proto/base/unique_fd.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace crumb {
namespace {

// A mapped and sealed memfd, as a chunk's.
class PopulateTest : public testing::Test {
 protected:
  PopulateTest() {
    EXPECT_EQ(ftruncate(memfd_.get(), static_cast<off_t>(kBytes)), 0);
    memory_ = static_cast<std::byte*>(
        mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, memfd_.get(), 0));
    EXPECT_NE(memory_, MAP_FAILED);
    EXPECT_EQ(fcntl(memfd_.get(), F_ADD_SEALS,
                    F_SEAL_FUTURE_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL),
              0);
  }
  ~PopulateTest() override { munmap(memory_, kBytes); }

  size_t AllocatedBytes() const {
    struct stat info {};
    EXPECT_EQ(fstat(memfd_.get(), &info), 0);
    return static_cast<size_t>(info.st_blocks) * 512;
  }

  static constexpr size_t kPage = 4096;
  static constexpr size_t kBytes = 64 * kPage;
  const UniqueFd memfd_{memfd_create("populate", MFD_CLOEXEC | MFD_ALLOW_SEALING)};
  std::byte* memory_ = nullptr;
};

TEST_F(PopulateTest, GivesThePagesOfTheRangeAndNoOther) {
  const std::span<std::byte> range(memory_ + 10 * kPage, 4 * kPage);
  ASSERT_EQ(Populate({memfd_.get(), 10 * kPage}, range), absl::OkStatus());
  EXPECT_EQ(AllocatedBytes(), 4 * kPage);
  std::vector<unsigned char> resident(64);
  ASSERT_EQ(mincore(memory_, kBytes, resident.data()), 0);
  EXPECT_EQ(std::count(resident.begin(), resident.end(), 1), 4);
  EXPECT_TRUE(std::ranges::all_of(range, [](std::byte b) { return b == std::byte{0}; }));
}

TEST_F(PopulateTest, RangeWithinPagesGivesThoseThatItTouches) {
  const std::span<std::byte> range(memory_ + 3 * kPage + 100, kPage);
  ASSERT_EQ(Populate({memfd_.get(), 3 * kPage + 100}, range), absl::OkStatus());
  EXPECT_EQ(AllocatedBytes(), 2 * kPage);
}

TEST_F(PopulateTest, WrittenBytesStay) {
  std::fill_n(memory_, kPage, std::byte{7});
  ASSERT_EQ(Populate({memfd_.get(), 0}, {memory_, 2 * kPage}), absl::OkStatus());
  EXPECT_EQ(memory_[kPage - 1], std::byte{7});
}

TEST_F(PopulateTest, NoOpForMemoryThatIsNotFresh) {
  ASSERT_EQ(Populate({}, {memory_, kBytes}), absl::OkStatus());
  EXPECT_EQ(AllocatedBytes(), 0u);
}

}  // namespace
}  // namespace crumb
