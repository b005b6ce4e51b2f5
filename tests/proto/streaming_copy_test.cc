// SPDX-License-Identifier: Apache-2.0
#include "proto/base/streaming_copy.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <random>
#include <span>
#include <vector>

#include "gtest/gtest.h"

#include "proto/base/crc32c.h"
#include "proto/base/crc32c_paths.h"

namespace crumb {
namespace {

constexpr size_t kLine = 64;

// As many bytes, at a multiple of a cache line.
struct Aligned {
  explicit Aligned(size_t size) : storage(size + kLine, std::byte{0xee}) {
    bytes = std::span(storage).subspan(-reinterpret_cast<uintptr_t>(storage.data()) % kLine, size);
  }
  std::vector<std::byte> storage;
  std::span<std::byte> bytes;
};

TEST(StreamingCopyTest, CopiesEveryLengthAtEveryAlignmentAndNothingBeside) {
  std::mt19937 random(1);
  std::vector<std::byte> source(40'000);
  std::generate(source.begin(), source.end(), [&] { return static_cast<std::byte>(random()); });
  for (const size_t length :
       {0u, 1u, 15u, 16u, 63u, 64u, 65u, 255u, 256u, 4096u, 4097u, 12'289u, 39'000u}) {
    for (const size_t from : {0u, 1u, 16u}) {
      for (const size_t to : {0u, 1u, 16u, 64u}) {
        const auto piece = std::span<const std::byte>(source).subspan(from, length);
        const auto expect_copied = [&](const Aligned& found) {
          const auto copied = found.bytes.subspan(to, length);
          EXPECT_TRUE(std::equal(piece.begin(), piece.end(), copied.begin()))
              << length << " " << from << " " << to;
          EXPECT_EQ(std::count(found.storage.begin(), found.storage.end(), std::byte{0xee}) -
                        std::count(copied.begin(), copied.end(), std::byte{0xee}),
                    static_cast<ptrdiff_t>(found.storage.size() - length));
        };
        Aligned streamed(source.size() + kLine);
        StreamingCopy(piece, streamed.bytes.subspan(to, length));
        expect_copied(streamed);
        Aligned checked(source.size() + kLine);
        EXPECT_EQ(StreamingCopyWithCrc32c(piece, checked.bytes.subspan(to, length), 77),
                  Crc32cByTable(piece, 77));
        expect_copied(checked);
        Aligned cached(source.size() + kLine);
        EXPECT_EQ(CopyWithCrc32c(piece, cached.bytes.subspan(to, length), 77),
                  Crc32cByTable(piece, 77));
        expect_copied(cached);
      }
    }
  }
}

// The source is shared with another process, which writes to it at any time.
TEST(StreamingCopyTest, ChecksumIsOfWhatWasWrittenWhileTheSourceChanges) {
  constexpr size_t kBytes = size_t{1} << 20;
  void* const shared =
      mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(shared, MAP_FAILED);
  const std::span source(static_cast<std::byte*>(shared), kBytes);
  const pid_t writer = fork();
  if (writer == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // However the test ends.
    for (uint32_t round = 0;; ++round) {
      for (size_t at = round % 61; at < kBytes; at += 61) {
        *static_cast<volatile std::byte*>(&source[at]) = static_cast<std::byte>(round);
      }
    }
  }
  ASSERT_GT(writer, 0);
  Aligned target(kBytes + 1);
  for (int round = 0; round < 10; ++round) {
    for (const size_t to : {0u, 1u}) {
      const auto copy = target.bytes.subspan(to, kBytes);
      const uint32_t streamed = StreamingCopyWithCrc32c(source, copy);
      EXPECT_EQ(streamed, Crc32cByTable(copy));
      const uint32_t cached = CopyWithCrc32c(source, copy);
      EXPECT_EQ(cached, Crc32cByTable(copy));
    }
  }
  kill(writer, SIGKILL);
  waitpid(writer, nullptr, 0);
  munmap(shared, kBytes);
}

}  // namespace
}  // namespace crumb
