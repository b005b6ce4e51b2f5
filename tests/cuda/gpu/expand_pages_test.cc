// SPDX-License-Identifier: Apache-2.0
//
// Expansion on the GPU against the twin, into caches as engines have them.
#include "crumb/cuda/expand_pages.h"

#include <cmath>
#include <cstring>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "proto/base/float16.h"
#include "tests/cuda/gpu/device_buffer.h"
#include "tests/cuda/gpu/expand_scene.h"
#include "tests/cuda/gpu/gpu_fixture.h"

namespace crumb {
namespace {

using testing::HasSubstr;

constexpr std::byte kUntouched{0xee};

class DeviceExpansion {
 public:
  DeviceExpansion(const PageScene& scene,
                  EngineCache& cache,
                  const std::vector<std::byte>& pages,
                  ExpandSpace space)
      : int2_(pages),
        cache_(cache.bytes()),
        pages_(scene.Table(static_cast<const std::byte*>(int2_.data()), scene.int2_bytes())),
        layers_(cache.Layers(cache_.data())),
        table_(cache.table()),
        left_out_(std::vector<uint64_t>{0}) {
    auto profile = DeviceProfile::Create(scene.geometry(), scene.heads());
    EXPECT_TRUE(profile.ok()) << profile.status();
    profile_ = *std::move(profile);
    params_ = cache.Params(pages_.data(), layers_.data(), table_.data(), space);
    params_.heads = profile_->heads();
    params_.rows_left_out = left_out_.data();
  }
  ExpandPagesParams& params() { return params_; }

  void DropPagesAndLayer(const std::vector<size_t>& pages, size_t layer) {
    auto page_table = pages_.Download();
    for (const size_t page : pages) {
      page_table[page] = nullptr;
    }
    pages_.Upload(page_table);
    auto layers = layers_.Download();
    layers[layer] = nullptr;
    layers_.Upload(layers);
  }

  std::vector<std::byte> Run() {
    cache_.Fill(static_cast<int>(kUntouched));
    const absl::Status status = ExpandPages(params_, nullptr);
    EXPECT_TRUE(status.ok()) << status;
    CRUMB_EXPECT_CUDA(cudaDeviceSynchronize());
    return cache_.Download();
  }

 private:
  DeviceBuffer<std::byte> int2_;
  DeviceBuffer<std::byte> cache_;
  DeviceBuffer<const std::byte*> pages_;
  DeviceBuffer<std::byte*> layers_;
  DeviceBuffer<int32_t> table_;
  DeviceBuffer<uint64_t> left_out_;
  std::unique_ptr<DeviceProfile> profile_;
  ExpandPagesParams params_;
};

std::vector<std::byte> Reference(const PageScene& scene,
                                 EngineCache& cache,
                                 const std::vector<std::byte>& pages,
                                 ExpandSpace space,
                                 absl::Status* status) {
  std::vector<std::byte> bytes(cache.bytes(), kUntouched);
  const auto table = scene.Table(pages.data(), scene.int2_bytes());
  const auto layers = cache.Layers(bytes.data());
  *status = ExpandPagesReference(
      cache.Params(table.data(), layers.data(), cache.table().data(), space), scene.heads());
  return bytes;
}

// Both are BF16 of nearly the same sum: apart by one step, and where the sum is small beside its
// terms by what the digits leave of those.
void ExpectNear(const std::vector<std::byte>& got, const std::vector<std::byte>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  size_t apart = 0;
  for (size_t i = 0; i < got.size(); i += 2) {
    uint16_t bits[2];
    std::memcpy(&bits[0], got.data() + i, 2);
    std::memcpy(&bits[1], expected.data() + i, 2);
    if (bits[0] == bits[1]) {
      continue;
    }
    ++apart;
    const float a = BFloat16{bits[0]}.ToFloat();
    const float b = BFloat16{bits[1]}.ToFloat();
    ASSERT_LE(std::fabs(a - b), std::fabs(b) / 128 + 1e-3f) << "element " << i / 2;
  }
  EXPECT_LT(static_cast<double>(apart), 0.03 * static_cast<double>(got.size()) / 2);
}

struct Case {
  uint32_t dim;
  CacheShape shape;
  CodecId codec = CodecId::kOscarInt2Aware;
};

class ExpandPagesGpuTest : public GpuFixture<testing::TestWithParam<Case>> {};

TEST_P(ExpandPagesGpuTest, RowsLandInTheEnginesCacheAndNothingElseIsTouched) {
  const Case& c = GetParam();
  const uint32_t pages = (c.shape.num_tokens + kPageTokens - 1) / kPageTokens;
  const PageScene scene({2, 3, c.dim, c.dim}, c.codec, pages);
  const auto int2 = RandomInt2Pages(scene, c.dim + c.shape.block_tokens);
  EngineCache cache(scene, c.shape);
  absl::Status status;
  const auto stored = Reference(scene, cache, int2, ExpandSpace::kRotated, &status);
  ASSERT_TRUE(status.ok()) << status;
  DeviceExpansion rotated(scene, cache, int2, ExpandSpace::kRotated);
  EXPECT_TRUE(rotated.Run() == stored) << "stored space is the twin's bytes";

  const auto model = Reference(scene, cache, int2, ExpandSpace::kModel, &status);
  DeviceExpansion device(scene, cache, int2, ExpandSpace::kModel);
  const auto got = device.Run();
  ExpectNear(got, model);
  EXPECT_TRUE(device.Run() == got) << "the same bytes again";
  EXPECT_TRUE(TakeExpandPagesProblem(device.params(), nullptr).ok());
}

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const uint32_t dim : {64u, 128u, 256u}) {
    for (const CacheOrder order : {CacheOrder::kNhd, CacheOrder::kHnd}) {
      for (const uint32_t block_tokens : {1u, 16u, 48u, 64u, 256u}) {
        cases.push_back({dim, {order, block_tokens, 0, 5 * kPageTokens}});
        cases.push_back({dim, {order, block_tokens, 37, 2 * kPageTokens + 9}});
      }
      cases.push_back({dim, {order, 32, 0, 3 * kPageTokens}, CodecId::kOscarInt2Tilted});
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Caches, ExpandPagesGpuTest, testing::ValuesIn(Cases()));

class ExpandPagesLimitsGpuTest : public GpuFixture<testing::Test> {};

TEST_F(ExpandPagesLimitsGpuTest, RowsWithoutABlockAreLeftOutAndCounted) {
  const PageScene scene({2, 2, 64, 64}, CodecId::kOscarInt2, 3);
  const auto int2 = RandomInt2Pages(scene, 1);
  EngineCache cache(scene, {CacheOrder::kNhd, 16, 0, 3 * kPageTokens});
  cache.table()[2] = -1;
  cache.table()[7] = 1000000;
  absl::Status status;
  const auto expected = Reference(scene, cache, int2, ExpandSpace::kRotated, &status);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  DeviceExpansion device(scene, cache, int2, ExpandSpace::kRotated);
  EXPECT_TRUE(device.Run() == expected);
  status = TakeExpandPagesProblem(device.params(), nullptr);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("left out 256 rows"));  // 32 * 2 * 2 * 2.
  EXPECT_TRUE(TakeExpandPagesProblem(device.params(), nullptr).ok()) << "it was taken out";
}

TEST_F(ExpandPagesLimitsGpuTest, RowsOfNullPagesAndLayersAreLeftOutAndCounted) {
  for (const uint32_t dim : {64u, 128u, 256u}) {
    for (const ExpandSpace space : {ExpandSpace::kRotated, ExpandSpace::kModel}) {
      SCOPED_TRACE(dim);
      const PageScene scene({2, 2, dim, dim}, CodecId::kOscarInt2Aware, 4);
      const auto int2 = RandomInt2Pages(scene, 1);
      EngineCache cache(scene, {CacheOrder::kNhd, 16, 0, 4 * kPageTokens - 20});
      DeviceExpansion device(scene, cache, int2, space);
      auto expected = device.Run();
      EXPECT_TRUE(TakeExpandPagesProblem(device.params(), nullptr).ok());
      device.DropPagesAndLayer({0, 2}, 1);
      for (const uint32_t page : {0u, 2u}) {
        for (uint32_t token = page * kPageTokens; token < (page + 1) * kPageTokens; ++token) {
          cache.FillRows(expected, /*layer=*/0, token, kUntouched);
        }
      }
      std::fill(expected.begin() + static_cast<ptrdiff_t>(cache.layer_bytes()), expected.end(),
                kUntouched);
      EXPECT_TRUE(device.Run() == expected);
      const absl::Status status = TakeExpandPagesProblem(device.params(), nullptr);
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
      // Of K and V of two heads, layer 0's 128 tokens and layer 1's 236.
      EXPECT_THAT(std::string(status.message()), HasSubstr("left out 1456 rows"));
      EXPECT_TRUE(TakeExpandPagesProblem(device.params(), nullptr).ok()) << "it was taken out";
      EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    }
  }
}

// A block of the cache more than 2^31 bytes from its layer's start.
TEST_F(ExpandPagesLimitsGpuTest, BlocksBeyond31Bits) {
  constexpr size_t kBlockStride = size_t{3} << 30;
  size_t available = 0;
  size_t total = 0;
  CRUMB_EXPECT_CUDA(cudaMemGetInfo(&available, &total));
  if (available < 2 * kBlockStride) {
    GTEST_SKIP() << "needs " << 2 * kBlockStride << " bytes of free device memory";
  }
  const PageScene scene({1, 1, 64, 64}, CodecId::kOscarInt2, 1);
  const auto int2 = RandomInt2Pages(scene, 1);
  EngineCache cache(scene, {CacheOrder::kNhd, 64, 0, kPageTokens});
  cache.table()[0] = 1;
  DeviceExpansion device(scene, cache, int2, ExpandSpace::kModel);
  const auto near = device.Run();
  const size_t block_bytes = cache.layer_bytes() / device.params().num_blocks;
  const DeviceBuffer<std::byte> far(kBlockStride + block_bytes);
  const DeviceBuffer<std::byte*> layers(std::vector<std::byte*>{far.data()});
  device.params().keys.layers = device.params().values.layers = layers.data();
  device.params().keys.block_stride = device.params().values.block_stride = kBlockStride;
  device.Run();
  std::vector<std::byte> got(block_bytes);
  CRUMB_EXPECT_CUDA(
      cudaMemcpy(got.data(), far.data() + kBlockStride, block_bytes, cudaMemcpyDeviceToHost));
  EXPECT_EQ(std::memcmp(got.data(), near.data() + block_bytes, block_bytes), 0);
}

}  // namespace
}  // namespace crumb
