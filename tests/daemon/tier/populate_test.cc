// SPDX-License-Identifier: Apache-2.0
#include "daemon/tier/populate.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

#include "proto/base/huge_page.h"
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

// Whether or not the system gives huge pages: what is told of the range holds, and its neighbours'
// bytes stay.
TEST_F(PopulateTest, HugePagesTakeNothingFromTheNeighbours) {
  constexpr size_t kFileBytes = 3 * kHugePageBytes + 5 * kPage;
  const UniqueFd memfd(memfd_create("populate", MFD_CLOEXEC));
  ASSERT_EQ(ftruncate(memfd.get(), static_cast<off_t>(kFileBytes)), 0);
  // Mapped at the start of a huge page, as a chunk is.
  void* reserved = mmap(nullptr, kFileBytes + kHugePageBytes, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(reserved, MAP_FAILED);
  auto* aligned = static_cast<std::byte*>(reserved);
  aligned += -reinterpret_cast<uintptr_t>(aligned) % kHugePageBytes;
  ASSERT_EQ(
      mmap(aligned, kFileBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memfd.get(), 0),
      aligned);
  const std::span<std::byte> mapping(aligned, kFileBytes);
  mapping[kPage] = std::byte{1};
  mapping[kHugePageBytes + 7] = std::byte{2};
  mapping[kFileBytes - 1] = std::byte{3};
  const size_t begin = kHugePageBytes - 3 * kPage;
  const size_t length = kFileBytes - begin - kPage;  // Over both bounds, into the part at the end.
  HugeUnits units(mapping);
  ASSERT_EQ(Populate({memfd.get(), begin, &units}, mapping.subspan(begin, length)),
            absl::OkStatus());
  std::vector<unsigned char> resident(length / kPage);
  ASSERT_EQ(mincore(&mapping[begin], length, resident.data()), 0);
  EXPECT_TRUE(std::ranges::all_of(resident, [](unsigned char page) { return (page & 1) != 0; }));
  EXPECT_EQ(mapping[kPage], std::byte{1});
  EXPECT_EQ(mapping[kHugePageBytes + 7], std::byte{2});
  EXPECT_EQ(mapping[kFileBytes - 1], std::byte{3});
  EXPECT_EQ(mapping[kHugePageBytes + 8], std::byte{0});
  munmap(reserved, kFileBytes + kHugePageBytes);
}

// Whatever the system gives, each finds its block's memory there when it has asked.
TEST_F(PopulateTest, ThreadsThatFillNeighboursDoNotGetInEachOthersWay) {
  constexpr size_t kBlock = kHugePageBytes * 2 / 3 / kPage * kPage;
  constexpr size_t kNumBlocks = 20;
  const UniqueFd memfd(memfd_create("populate", MFD_CLOEXEC));
  ASSERT_EQ(ftruncate(memfd.get(), kNumBlocks * kBlock), 0);
  void* const memory = MapAtHugePage(memfd.get(), kNumBlocks * kBlock, PROT_READ | PROT_WRITE);
  ASSERT_NE(memory, MAP_FAILED);
  const std::span mapping(static_cast<std::byte*>(memory), kNumBlocks * kBlock);
  HugeUnits units(mapping);
  std::atomic<size_t> next = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (size_t block = next++; block < kNumBlocks; block = next++) {
        const auto bytes = mapping.subspan(block * kBlock, kBlock);
        EXPECT_EQ(Populate({memfd.get(), block * kBlock, &units}, bytes), absl::OkStatus());
        std::vector<unsigned char> resident(kBlock / kPage);
        EXPECT_EQ(mincore(bytes.data(), kBlock, resident.data()), 0);
        EXPECT_TRUE(
            std::ranges::all_of(resident, [](unsigned char page) { return (page & 1) != 0; }));
        std::ranges::fill(bytes, static_cast<std::byte>(block));
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (size_t block = 0; block < kNumBlocks; ++block) {
    EXPECT_TRUE(std::ranges::all_of(mapping.subspan(block * kBlock, kBlock), [&](std::byte byte) {
      return byte == static_cast<std::byte>(block);
    }));
  }
  munmap(memory, mapping.size());
}

TEST_F(PopulateTest, NoOpForMemoryThatIsNotFresh) {
  ASSERT_EQ(Populate({}, {memory_, kBytes}), absl::OkStatus());
  EXPECT_EQ(AllocatedBytes(), 0u);
}

}  // namespace
}  // namespace crumb
