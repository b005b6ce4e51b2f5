// SPDX-License-Identifier: Apache-2.0
//
// Who holds staging memory for a device, and when that ends. What memfds are taken is tested over
// the socket (memory_socket_test.cc).
#include "daemon/transfer/staging_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

#include "proto/base/unique_fd.h"

namespace crumb {
namespace {

constexpr size_t kBytes = 8192;

std::shared_ptr<const StagingMemory> Mapped() {
  const UniqueFd memfd(::memfd_create("staging", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(::ftruncate(memfd.get(), kBytes), 0);
  EXPECT_EQ(::fcntl(memfd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
  auto memory = StagingMemory::MapMemfd(memfd.get(), kBytes);
  EXPECT_TRUE(memory.ok()) << memory.status();
  return *std::move(memory);
}

TEST(StagingMemoryTest, HoldIsMadeOnceAndEndsBeforeTheMemoryIsUnmapped) {
  auto memory = Mapped();
  bool could_be_read = false;
  int num_holds = 0;
  const auto hold = [&]() -> std::shared_ptr<const void> {
    ++num_holds;
    const std::byte* const bytes = memory->bytes().data();
    return std::shared_ptr<const void>(
        bytes, [&, bytes](const void*) { could_be_read = bytes[kBytes - 1] == std::byte{0}; });
  };
  EXPECT_TRUE(memory->IsHeldByDevice(hold));
  EXPECT_TRUE(memory->IsHeldByDevice(hold));
  EXPECT_EQ(num_holds, 1);
  memory = nullptr;
  EXPECT_TRUE(could_be_read);
}

TEST(StagingMemoryTest, DeviceThatHoldsNothingIsNotAskedAgain) {
  const auto memory = Mapped();
  int num_asked = 0;
  const auto hold = [&]() -> std::shared_ptr<const void> {
    ++num_asked;
    return nullptr;
  };
  EXPECT_FALSE(memory->IsHeldByDevice(hold));
  EXPECT_FALSE(memory->IsHeldByDevice(hold));
  EXPECT_EQ(num_asked, 1);
}

TEST(StagingMemoryTest, OthersDoNotWaitForTheHoldToBeMade) {
  const auto memory = Mapped();
  std::atomic<bool> is_asked = false;
  std::atomic<bool> may_go_on = false;
  std::thread first([&] {
    EXPECT_TRUE(memory->IsHeldByDevice([&]() -> std::shared_ptr<const void> {
      is_asked = true;
      while (!may_go_on) {
        std::this_thread::yield();
      }
      return std::make_shared<int>(1);
    }));
  });
  while (!is_asked) {
    std::this_thread::yield();
  }
  EXPECT_FALSE(memory->IsHeldByDevice([]() -> std::shared_ptr<const void> {
    ADD_FAILURE() << "a second hold";
    return nullptr;
  }));
  may_go_on = true;
  first.join();
}

TEST(StagingMemoryTest, MemoryOfOnePublishIsNotHeld) {
  const std::vector<std::byte> bytes(kBytes);
  const StagingMemory memory(bytes, [] {});
  EXPECT_FALSE(memory.IsHeldByDevice([]() -> std::shared_ptr<const void> {
    ADD_FAILURE() << "held";
    return nullptr;
  }));
}

}  // namespace
}  // namespace crumb
