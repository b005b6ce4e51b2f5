// SPDX-License-Identifier: Apache-2.0
//
// What demotion on the GPU says of rows and pages that it cannot take, and what it leaves alone.
#include <algorithm>
#include <cstring>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "crumb/cuda/demote_pages.h"
#include "tests/cuda/gpu/demote_scene.h"
#include "tests/cuda/gpu/device_buffer.h"
#include "tests/cuda/gpu/gpu_fixture.h"
#include "tests/cuda/gpu/page_scene.h"

namespace crumb {
namespace {

using testing::HasSubstr;

// Tables of `device` that lack a page each; it runs while they live.
class NullPages {
 public:
  NullPages(DevicePages& device, size_t of_keys, size_t of_values, size_t of_int2)
      : keys_(Without(device.params().keys.pages, device.params().num_pages, of_keys)),
        values_(Without(device.params().values.pages, device.params().num_pages, of_values)),
        int2_(Without(device.params().int2.pages, device.params().num_pages, of_int2)) {
    device.params().keys.pages = keys_.data();
    device.params().values.pages = values_.data();
    device.params().int2.pages = int2_.data();
  }

 private:
  template <typename Page>
  static DeviceBuffer<Page> Without(const Page* table, size_t num_pages, size_t page) {
    std::vector<Page> copy(num_pages);
    CRUMB_EXPECT_CUDA(
        cudaMemcpy(copy.data(), table, num_pages * sizeof(Page), cudaMemcpyDeviceToHost));
    copy[page] = nullptr;
    return DeviceBuffer<Page>(copy);
  }

  DeviceBuffer<const std::byte*> keys_;
  DeviceBuffer<const std::byte*> values_;
  DeviceBuffer<std::byte*> int2_;
};

class DemotePagesLimitsGpuTest : public GpuFixture<testing::Test> {};

// An engine's own tensor [token, head, dim] for each layer, and a part of layers and heads.
TEST_F(DemotePagesLimitsGpuTest, EnginesTensorsAndPartsOfTheProfile) {
  constexpr uint32_t kDim = 64;
  const PageScene scene({3, 4, kDim, kDim}, CodecId::kOscarInt2, 5);
  const PageScene part({2, 2, kDim, kDim}, CodecId::kOscarInt2, 5);
  const std::vector<BFloat16> images = part.RandomRows(2);
  // [layer][token][head][dim], K then V of a layer.
  const size_t layer_elements = size_t{5} * kPageTokens * 2 * kDim;
  std::vector<BFloat16> tensors(2 * 2 * layer_elements);
  for (uint32_t page = 0; page < 5; ++page) {
    for (uint32_t layer = 0; layer < 2; ++layer) {
      for (uint32_t head = 0; head < 2; ++head) {
        for (uint32_t row = 0; row < 2 * kPageTokens; ++row) {
          const size_t block = page * 4 + head * 2 + layer;
          const size_t token = page * kPageTokens + row % kPageTokens;
          std::memcpy(&tensors[(2 * layer + row / kPageTokens) * layer_elements +
                               (token * 2 + head) * kDim],
                      &images[(block * 2 * kPageTokens + row) * kDim], 2 * kDim);
        }
      }
    }
  }
  DevicePages device(part, images);
  auto profile = DeviceProfile::Create(scene.geometry(), scene.heads());
  ASSERT_TRUE(profile.ok());
  device.params().heads = (*profile)->heads();
  device.params().first_layer = 1;
  device.params().first_head = 2;
  const auto from_images = device.Run();

  const DeviceBuffer<BFloat16> on_device(tensors);
  std::vector<const std::byte*> table;
  for (uint32_t page = 0; page < 5; ++page) {
    table.push_back(reinterpret_cast<const std::byte*>(on_device.data() +
                                                       size_t{page} * kPageTokens * 2 * kDim));
  }
  const DeviceBuffer<const std::byte*> device_table(table);
  device.params().keys = {device_table.data(), 0, 4 * layer_elements, 2 * kDim, 4 * kDim};
  device.params().values = device.params().keys;
  device.params().values.offset = 2 * layer_elements;
  EXPECT_EQ(CountDifferentBytes(device.Run(), from_images), 0u);

  // The profile's layers 1 and 2 and heads 2 and 3, which have other matrices.
  const auto to_host =
      part.Table(reinterpret_cast<const std::byte*>(images.data()), part.bf16_bytes());
  std::vector<std::byte> int2(part.num_pages() * part.int2_bytes());
  const auto int2_table = part.Table(int2.data(), part.int2_bytes());
  DemotePagesParams params = part.Demotion(to_host.data(), int2_table.data());
  params.heads.num_layers = 3;
  params.heads.num_kv_heads = 4;
  params.first_layer = 1;
  params.first_head = 2;
  ASSERT_TRUE(DemotePagesReference(params, scene.heads()).ok());
  EXPECT_LT(static_cast<double>(CountDifferentBytes(from_images, int2)),
            0.06 * static_cast<double>(int2.size()));
}

TEST_F(DemotePagesLimitsGpuTest, RowsThatAreNotFiniteAreNamedAndTheirPartLeftAlone) {
  constexpr uint32_t kDim = 128;
  for (const CodecId codec :
       {CodecId::kOscarInt2, CodecId::kOscarInt2Aware, CodecId::kOscarInt2Tilted}) {
    for (const bool rotated : {false, true}) {
      const PageScene scene({2, 2, kDim, kDim}, codec, 4);
      std::vector<BFloat16> rows = scene.RandomRows(3);
      DevicePages device(scene, rows);
      device.params().rows_are_rotated = rotated;
      const auto good = device.Run();
      // Page 2, layer 1, head 1: K's token 17; and a later V.
      const size_t block = 2 * 4 + 1 * 2 + 1;
      const size_t elements = Bf16HeadBlock{kDim, kDim}.bytes() / 2;
      rows[block * elements + 17 * kDim + 99] = BFloat16{0x7fc0};
      rows[(3 * 4 + 2) * elements + (kPageTokens + 5) * kDim] = BFloat16{0xff80};
      device.bf16().Upload(rows);
      auto expected = good;
      const Int2HeadBlock format{kDim, kDim};
      const auto spoil = [&](size_t at, size_t offset, size_t bytes) {
        std::fill_n(expected.begin() + static_cast<ptrdiff_t>(at * format.bytes() + offset), bytes,
                    std::byte{0xee});
      };
      spoil(block, format.key_codes_offset(), format.key_codes_bytes());
      spoil(block, format.key_meta_offset(), Int2HeadBlock::meta_bytes());
      spoil(14, format.value_codes_offset(), format.value_codes_bytes());
      spoil(14, format.value_meta_offset(), Int2HeadBlock::meta_bytes());
      EXPECT_EQ(CountDifferentBytes(device.Run(), expected), 0u);
      const absl::Status status = TakeDemotePagesProblem(device.params(), nullptr);
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(std::string(status.message()),
                  HasSubstr("K holds NaN or inf at page 2 of the launch, layer 1, KV head 1, "
                            "token 17 of the page"));
      EXPECT_TRUE(TakeDemotePagesProblem(device.params(), nullptr).ok()) << "it was taken out";
    }
  }
}

TEST_F(DemotePagesLimitsGpuTest, NullPagesAreNamedAndTheirPartsLeftAlone) {
  for (const CodecId codec : kCodecs) {
    for (const uint32_t dim : {64u, 128u, 256u}) {
      for (const bool rotated : {false, true}) {
        SCOPED_TRACE(std::string(CodecName(codec)) + ", head_dim " + std::to_string(dim));
        const PageScene scene({1, 2, dim, dim}, codec, 5);
        DevicePages device(scene, scene.RandomRows(3));
        device.params().rows_are_rotated = rotated;
        auto expected = device.Run();
        // K of the first page, V of the fourth, and all of the last.
        const NullPages tables(device, /*of_keys=*/0, /*of_values=*/3, /*of_int2=*/4);
        const Int2HeadBlock format{dim, dim};
        for (size_t head = 0; head < 2; ++head) {
          const auto spoil = [&](size_t page, size_t offset, size_t bytes) {
            std::fill_n(expected.begin() +
                            static_cast<ptrdiff_t>((page * 2 + head) * format.bytes() + offset),
                        bytes, std::byte{0xee});
          };
          spoil(0, format.key_codes_offset(), format.key_codes_bytes());
          spoil(0, format.key_meta_offset(), Int2HeadBlock::meta_bytes());
          spoil(3, format.value_codes_offset(), format.value_codes_bytes());
          spoil(3, format.value_meta_offset(), Int2HeadBlock::meta_bytes());
          spoil(4, 0, format.bytes());
        }
        EXPECT_EQ(CountDifferentBytes(device.Run(), expected), 0u);
        const absl::Status status = TakeDemotePagesProblem(device.params(), nullptr);
        EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
        EXPECT_THAT(std::string(status.message()), HasSubstr("keys.pages[0] is null"));
        EXPECT_TRUE(TakeDemotePagesProblem(device.params(), nullptr).ok()) << "it was taken out";

        const DeviceBuffer<uint64_t> findings(std::vector<uint64_t>(5, 0));
        device.params().finding = findings.data();
        device.params().has_finding_per_page = true;
        EXPECT_EQ(CountDifferentBytes(device.Run(), expected), 0u);
        std::vector<std::string> found;
        for (const uint64_t word : findings.Download()) {
          found.emplace_back(DescribeDemoteFinding(device.params(), word).message());
        }
        EXPECT_THAT(found, testing::ElementsAre(HasSubstr("keys.pages[0] is null"), "", "",
                                                HasSubstr("values.pages[3] is null"),
                                                HasSubstr("int2.pages[4] is null")));
        EXPECT_EQ(cudaGetLastError(), cudaSuccess);
      }
    }
  }
}

TEST_F(DemotePagesLimitsGpuTest, EachPageHasAFindingOfItsOwnWhereItIsAskedFor) {
  constexpr uint32_t kDim = 64;
  const PageScene scene({2, 2, kDim, kDim}, CodecId::kOscarInt2, 4);
  std::vector<BFloat16> rows = scene.RandomRows(3);
  const size_t elements = Bf16HeadBlock{kDim, kDim}.bytes() / 2;
  rows[(1 * 4 + 3) * elements + 17 * kDim + 9] = BFloat16{0x7fc0};
  rows[(3 * 4 + 2) * elements + (kPageTokens + 5) * kDim] = BFloat16{0xff80};
  DevicePages device(scene, rows);
  const DeviceBuffer<uint64_t> findings(std::vector<uint64_t>(4, 0));
  device.params().rows_are_rotated = true;
  device.params().finding = findings.data();
  device.params().has_finding_per_page = true;
  device.Run();
  const std::vector<uint64_t> words = findings.Download();
  const auto describe = [&](size_t page) {
    return std::string(DescribeDemoteFinding(device.params(), words[page]).message());
  };
  EXPECT_EQ(words[0], 0u);
  EXPECT_EQ(words[2], 0u);
  EXPECT_TRUE(DescribeDemoteFinding(device.params(), words[0]).ok());
  EXPECT_THAT(describe(1), HasSubstr("K holds NaN or inf at page 1 of the launch, layer 1, KV head "
                                     "1, token 17"));
  EXPECT_THAT(describe(3), HasSubstr("V holds NaN or inf at page 3 of the launch, layer 0, KV head "
                                     "1, token 5"));
  EXPECT_EQ(TakeDemotePagesProblem(device.params(), nullptr).code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(DemotePagesLimitsGpuTest, ReplaysOfAGraphGiveTheSameBytes) {
  const PageScene scene({2, 4, 128, 128}, CodecId::kOscarInt2Tilted, 40);
  DevicePages device(scene, scene.RandomRows(4));
  const auto first = device.Run();
  const TestStream stream;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  CRUMB_EXPECT_CUDA(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal));
  EXPECT_TRUE(DemotePages(device.params(), stream.get()).ok());
  CRUMB_EXPECT_CUDA(cudaStreamEndCapture(stream.get(), &graph));
  CRUMB_EXPECT_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  for (int i = 0; i < 3; ++i) {
    CRUMB_EXPECT_CUDA(cudaGraphLaunch(executable, stream.get()));
  }
  stream.Wait();
  EXPECT_EQ(CountDifferentBytes(device.Run(), first), 0u);
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
}

// Layers apart by more than 2^31 bytes, on either side.
TEST_F(DemotePagesLimitsGpuTest, StridesBeyond31Bits) {
  constexpr size_t kLayerStride = (size_t{5} << 30) / 2;
  size_t available = 0;
  size_t total = 0;
  CRUMB_EXPECT_CUDA(cudaMemGetInfo(&available, &total));
  if (available < 3 * 2 * kLayerStride) {
    GTEST_SKIP() << "needs " << 3 * 2 * kLayerStride << " bytes of free device memory";
  }
  const PageScene scene({2, 1, 64, 64}, CodecId::kOscarInt2, 1);
  const std::vector<BFloat16> rows = scene.RandomRows(8);
  DevicePages device(scene, rows);
  const auto expected = device.Run();
  const size_t bf16 = scene.geometry().HeadBlockBytes(PageEncoding::kBf16);
  const size_t int2 = scene.geometry().HeadBlockBytes(PageEncoding::kInt2);
  const DeviceBuffer<std::byte> from(kLayerStride + bf16);
  const DeviceBuffer<std::byte> to(kLayerStride + int2);
  for (size_t layer = 0; layer < 2; ++layer) {
    CRUMB_EXPECT_CUDA(cudaMemcpy(from.data() + layer * kLayerStride,
                                 reinterpret_cast<const std::byte*>(rows.data()) + layer * bf16,
                                 bf16, cudaMemcpyHostToDevice));
  }
  const DeviceBuffer<const std::byte*> from_table(std::vector<const std::byte*>{from.data()});
  const DeviceBuffer<std::byte*> to_table(std::vector<std::byte*>{to.data()});
  device.params().keys.pages = device.params().values.pages = from_table.data();
  device.params().keys.layer_stride = device.params().values.layer_stride = kLayerStride;
  device.params().int2 = {to_table.data(), 0, kLayerStride, 0};
  device.Run();
  std::vector<std::byte> got(2 * int2);
  for (size_t layer = 0; layer < 2; ++layer) {
    CRUMB_EXPECT_CUDA(cudaMemcpy(got.data() + layer * int2, to.data() + layer * kLayerStride, int2,
                                 cudaMemcpyDeviceToHost));
  }
  EXPECT_EQ(CountDifferentBytes(got, expected), 0u);
}

}  // namespace
}  // namespace crumb
