// SPDX-License-Identifier: Apache-2.0
//
// Checksums on the GPU against the host's.
#include "crumb/cuda/checksum_pages.h"

#include <cstring>
#include <random>
#include <vector>

#include "gtest/gtest.h"

#include "proto/base/crc32c.h"
#include "proto/page/geometry.h"
#include "tests/cuda/gpu/device_buffer.h"
#include "tests/cuda/gpu/gpu_fixture.h"

namespace crumb {
namespace {

class ChecksumPagesGpuTest : public GpuFixture<testing::Test> {};

struct Shape {
  uint32_t num_pages;
  uint32_t num_ranges;
  size_t range_bytes;
  size_t gap = 0;  // Between ranges, and before the first.
};

void ExpectHostsChecksums(const Shape& shape) {
  const size_t stride = shape.range_bytes + shape.gap;
  const size_t page_bytes = shape.gap + shape.num_ranges * stride;
  std::mt19937_64 random(shape.range_bytes + shape.num_pages);
  std::vector<uint64_t> words(shape.num_pages * page_bytes / 8);
  for (uint64_t& word : words) {
    word = random();
  }
  if (shape.num_pages > 2) {  // A page of zeros, which only the inversions make visible.
    std::memset(words.data() + page_bytes / 8, 0, page_bytes);
  }
  const DeviceBuffer<uint64_t> device(words);
  std::vector<const std::byte*> host_table;
  std::vector<const std::byte*> device_table;
  for (uint32_t page = 0; page < shape.num_pages; ++page) {
    host_table.push_back(reinterpret_cast<const std::byte*>(words.data()) + page * page_bytes);
    device_table.push_back(reinterpret_cast<const std::byte*>(device.data()) + page * page_bytes);
  }
  const DeviceBuffer<const std::byte*> table(device_table);
  std::vector<uint32_t> expected(size_t{shape.num_pages} * shape.num_ranges);
  ChecksumPagesParams params{.num_pages = shape.num_pages,
                             .num_ranges = shape.num_ranges,
                             .pages = host_table.data(),
                             .offset = shape.gap,
                             .range_stride = stride,
                             .range_bytes = shape.range_bytes,
                             .checksums = expected.data()};
  ASSERT_TRUE(ChecksumPagesReference(params).ok());
  const DeviceBuffer<uint32_t> checksums(expected.size());  // Of 0xff before.
  params.pages = table.data();
  params.checksums = checksums.data();
  for (int run = 0; run < 2; ++run) {
    const absl::Status status = ChecksumPages(params, nullptr);
    ASSERT_TRUE(status.ok()) << status;
    CRUMB_EXPECT_CUDA(cudaDeviceSynchronize());
    EXPECT_EQ(checksums.Download(), expected)
        << shape.num_pages << " pages, " << shape.num_ranges << " x " << shape.range_bytes;
  }
}

TEST_F(ChecksumPagesGpuTest, AreTheHostsForEveryGeometryAndEncoding) {
  for (const uint32_t dim : {64u, 128u, 256u}) {
    for (const PageEncoding encoding : {PageEncoding::kInt2, PageEncoding::kBf16}) {
      const Geometry geometry{5, 3, dim, dim};
      ExpectHostsChecksums({7, 3, geometry.HeadRangeBytes(encoding)});
    }
  }
}

TEST_F(ChecksumPagesGpuTest, AreTheHostsForAnyNumberOfUnits) {
  for (const size_t units : {1u, 2u, 3u, 4u, 5u, 7u, 8u, 9u, 15u, 16u, 31u, 33u, 300u, 324u}) {
    ExpectHostsChecksums({1, 1, units * 512});
    ExpectHostsChecksums({3, 2, units * 512, 64});
  }
  ExpectHostsChecksums({40, 8, 36 * 4608});
  ExpectHostsChecksums({600, 8, 4608});
}

TEST_F(ChecksumPagesGpuTest, OneBitChangesTheChecksum) {
  constexpr size_t kBytes = size_t{36} * 4608;
  const DeviceBuffer<std::byte> bytes(kBytes);
  const DeviceBuffer<const std::byte*> table(std::vector<const std::byte*>{bytes.data()});
  const DeviceBuffer<uint32_t> checksum(1);
  const ChecksumPagesParams params{.num_pages = 1,
                                   .num_ranges = 1,
                                   .pages = table.data(),
                                   .range_bytes = kBytes,
                                   .checksums = checksum.data()};
  ASSERT_TRUE(ChecksumPages(params, nullptr).ok());
  const uint32_t before = checksum.Download()[0];
  for (const size_t at : {size_t{0}, size_t{511}, kBytes / 2, kBytes - 1}) {
    CRUMB_EXPECT_CUDA(cudaMemset(bytes.data() + at, 0xfe, 1));
    ASSERT_TRUE(ChecksumPages(params, nullptr).ok());
    EXPECT_NE(checksum.Download()[0], before) << "byte " << at;
    CRUMB_EXPECT_CUDA(cudaMemset(bytes.data() + at, 0xff, 1));
  }
}

TEST_F(ChecksumPagesGpuTest, NullPageHasTheChecksumsOfNoBytes) {
  const DeviceBuffer<std::byte> bytes(2 * 512);
  const DeviceBuffer<const std::byte*> table(
      std::vector<const std::byte*>{nullptr, bytes.data(), nullptr});
  const DeviceBuffer<uint32_t> checksums(6);
  ASSERT_TRUE(ChecksumPages({.num_pages = 3,
                             .num_ranges = 2,
                             .pages = table.data(),
                             .range_stride = 512,
                             .range_bytes = 512,
                             .checksums = checksums.data()},
                            nullptr)
                  .ok());
  CRUMB_EXPECT_CUDA(cudaDeviceSynchronize());
  const std::vector<uint32_t> got = checksums.Download();
  const uint32_t full = Crc32c(std::vector<std::byte>(512, std::byte{0xff}));
  EXPECT_EQ(got, (std::vector<uint32_t>{0, 0, full, full, 0, 0}));
}

// A range more than 2^31 bytes from its page's start, and one larger than that.
TEST_F(ChecksumPagesGpuTest, RangesBeyond31Bits) {
  constexpr size_t kStride = (size_t{5} << 30) / 2;
  constexpr size_t kBytes = 4608;
  size_t available = 0;
  size_t total = 0;
  CRUMB_EXPECT_CUDA(cudaMemGetInfo(&available, &total));
  if (available < 2 * kStride) {
    GTEST_SKIP() << "needs " << 2 * kStride << " bytes of free device memory";
  }
  const DeviceBuffer<std::byte> bytes(kStride + kBytes);
  CRUMB_EXPECT_CUDA(cudaMemset(bytes.data() + kStride, 0x5a, kBytes));
  const DeviceBuffer<const std::byte*> table(std::vector<const std::byte*>{bytes.data()});
  const DeviceBuffer<uint32_t> checksums(2);
  const ChecksumPagesParams params{.num_pages = 1,
                                   .num_ranges = 2,
                                   .pages = table.data(),
                                   .range_stride = kStride,
                                   .range_bytes = kBytes,
                                   .checksums = checksums.data()};
  ASSERT_TRUE(ChecksumPages(params, nullptr).ok());
  const std::vector<std::byte> host[2] = {std::vector<std::byte>(kBytes, std::byte{0xff}),
                                          std::vector<std::byte>(kBytes, std::byte{0x5a})};
  std::vector<uint32_t> expected(2);
  for (int i = 0; i < 2; ++i) {
    const std::byte* page = host[i].data();
    ASSERT_TRUE(ChecksumPagesReference({.num_pages = 1,
                                        .num_ranges = 1,
                                        .pages = &page,
                                        .range_bytes = kBytes,
                                        .checksums = &expected[static_cast<size_t>(i)]})
                    .ok());
  }
  EXPECT_EQ(checksums.Download(), expected);
}

}  // namespace
}  // namespace crumb
