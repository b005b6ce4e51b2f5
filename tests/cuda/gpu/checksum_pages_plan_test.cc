// SPDX-License-Identifier: Apache-2.0
//
// What needs no GPU of checksums: what is refused, and the plan's arithmetic, by doing on the host
// what lanes and segments do.
#include <functional>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "crumb/cuda/checksum_pages.h"
#include "cuda/gpu/checksum_plan.h"
#include "proto/base/crc32c.h"

namespace crumb {
namespace {

using testing::HasSubstr;

uint32_t Apply(const gpu::CrcAdvance& advance, uint32_t crc) {
  uint32_t image = 0;
  for (uint32_t bit = 0; bit < 32; ++bit) {
    image ^= (crc >> bit & 1) != 0 ? advance.of_bit[bit] : 0;
  }
  return image;
}

uint32_t Multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (int bit = 31; bit >= 0; --bit) {
    product ^= (a >> bit & 1) != 0 ? b : 0;
    b = (b >> 1) ^ ((b & 1) != 0 ? 0x82f63b78u : 0);
  }
  return product;
}

uint32_t SegmentRegister(const gpu::ChecksumPlan& plan, std::span<const uint32_t> words) {
  std::vector<uint32_t> sums(32);
  for (size_t lane = 0; lane < 32; ++lane) {
    uint32_t crc[4] = {};
    for (size_t unit = 0; unit < words.size(); unit += 128) {
      for (size_t i = 0; i < 4; ++i) {
        crc[i] = Apply(plan.unit, crc[i]) ^ words[unit + lane * 4 + i];
      }
    }
    sums[lane] = crc[0];
    for (size_t i = 1; i < 4; ++i) {
      sums[lane] = Apply(plan.lane[0], sums[lane]) ^ crc[i];
    }
  }
  for (size_t i = 0; i < 5; ++i) {
    for (size_t lane = 0; lane + (size_t{1} << i) < 32; ++lane) {
      sums[lane] = Apply(plan.lane[1 + i], sums[lane]) ^ sums[lane + (size_t{1} << i)];
    }
  }
  return Apply(plan.lane[0], sums[0]);
}

TEST(ChecksumPlanTest, LanesAndSegmentsMeetInTheChecksum) {
  std::mt19937 random(1);
  for (const size_t units : {1u, 5u, 16u, 33u, 324u}) {
    for (const uint32_t warps : {1u, 7u, 4000u}) {
      std::vector<uint32_t> words(units * 128);
      for (uint32_t& word : words) {
        word = static_cast<uint32_t>(random());
      }
      const gpu::ChecksumPlan plan =
          gpu::PlanChecksum({.num_pages = 1, .num_ranges = 1, .range_bytes = units * 512}, warps);
      uint32_t checksum = plan.start;
      for (uint32_t segment = 0; segment < plan.num_segments; ++segment) {
        const size_t begin = units * segment / plan.num_segments;
        const size_t end = units * (segment + 1) / plan.num_segments;
        checksum ^= Multiply(
            SegmentRegister(plan, std::span(words).subspan(begin * 128, (end - begin) * 128)),
            plan.to_end[segment]);
      }
      EXPECT_EQ(checksum, Crc32c(std::as_bytes(std::span(words))))
          << units << " units in " << plan.num_segments << " segments";
    }
  }
}

alignas(256) std::byte g_memory[256];

struct BadParams {
  const char* name;
  std::function<void(ChecksumPagesParams&)> spoil;
  std::vector<const char*> words;
};

class ValidateChecksumPagesTest : public testing::TestWithParam<BadParams> {};

TEST_P(ValidateChecksumPagesTest, NamesTheFieldItsValueAndTheLimit) {
  ChecksumPagesParams params{.num_pages = 2,
                             .num_ranges = 8,
                             .pages = reinterpret_cast<const std::byte* const*>(g_memory),
                             .range_stride = 4608,
                             .range_bytes = 4608,
                             .checksums = reinterpret_cast<uint32_t*>(g_memory)};
  ASSERT_TRUE(ValidateChecksumPages(params).ok());
  GetParam().spoil(params);
  const absl::Status status = ChecksumPages(params, nullptr);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  for (const char* word : GetParam().words) {
    EXPECT_THAT(std::string(status.message()), HasSubstr(word));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Fields,
    ValidateChecksumPagesTest,
    testing::Values(
        BadParams{"Pages", [](auto& p) { p.num_pages = 0; }, {"num_pages is 0", "from 1"}},
        BadParams{"Ranges", [](auto& p) { p.num_ranges = 65; }, {"num_ranges is 65", "to 64"}},
        BadParams{"Table", [](auto& p) { p.pages = nullptr; }, {"pages is at address 0"}},
        BadParams{"Bytes", [](auto& p) { p.range_bytes = 100; }, {"range_bytes is 100", "512"}},
        BadParams{"Stride", [](auto& p) { p.range_stride = 8; }, {"range_stride is 8", "16"}},
        BadParams{"Out", [](auto& p) { p.checksums = nullptr; }, {"checksums is at address 0"}}),
    [](const auto& bad) { return std::string(bad.param.name); });

}  // namespace
}  // namespace crumb
