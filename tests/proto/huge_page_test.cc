// SPDX-License-Identifier: Apache-2.0
#include "proto/base/huge_page.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <vector>

#include "proto/base/unique_fd.h"

namespace crumb {
namespace {

TEST(HugePageTest, EveryMappingOfAFileBeginsAtOneAndShowsTheFile) {
  constexpr size_t kBytes = 3 * kHugePageBytes + 12345;  // No whole page.
  const UniqueFd file(memfd_create("huge-page-test", MFD_CLOEXEC));
  ASSERT_EQ(ftruncate(file.get(), kBytes), 0);
  std::vector<unsigned char*> mappings;
  for (int i = 0; i < 8; ++i) {
    void* memory = MapAtHugePage(file.get(), kBytes, PROT_READ | PROT_WRITE);
    ASSERT_NE(memory, MAP_FAILED);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory) % kHugePageBytes, 0u);
    mappings.push_back(static_cast<unsigned char*>(memory));
  }
  mappings.front()[kBytes - 1] = 7;
  for (unsigned char* memory : mappings) {
    EXPECT_EQ(memory[kBytes - 1], 7);
    EXPECT_EQ(munmap(memory, kBytes), 0);
  }
}

TEST(HugePageTest, WhatCannotBeMappedSaysWhy) {
  EXPECT_EQ(MapAtHugePage(-1, 4096, PROT_READ), MAP_FAILED);
  EXPECT_EQ(errno, EBADF);
}

}  // namespace
}  // namespace crumb
