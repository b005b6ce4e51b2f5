// SPDX-License-Identifier: Apache-2.0
#include "client/transport/upload_plan.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "gtest/gtest.h"

#include "tests/support/host_upload.h"
#include "tests/support/transfer_pages.h"

namespace crumb::testing {
namespace {

constexpr Geometry kGeometry{.num_layers = 5, .num_kv_heads = 4, .key_dim = 64, .value_dim = 128};
constexpr HeadRange kHeads{1, 2};
constexpr uint32_t kPages = 7;
constexpr uint32_t kSalt = 3;

// Pages of a rank in host memory: the first layers [layer][page][kv_head], after them one image a
// page, in any order. The first page is in BF16, the last in both encodings, and one page on a
// device.
class LaidOut final : public PageSource {
 public:
  LaidOut(uint32_t ordered_layers, std::vector<uint32_t> order_of_images)
      : ordered_layers_(ordered_layers), images_(kPages), order_(std::move(order_of_images)) {
    size_t image_bytes = 0;
    for (const uint32_t page : order_) {
      for (const PageEncoding encoding : {PageEncoding::kInt2, PageEncoding::kBf16}) {
        if (Has(page, encoding)) {
          images_[page][Index(encoding)] = image_bytes;
          image_bytes += kHeads.count * kGeometry.HeadRangeBytes(encoding);
        }
      }
    }
    image_bytes_ = image_bytes;
    memory_.resize(image_bytes + ordered_layers * LayerBytes(), std::byte{0xee});
    ForEachBlock([this](uint32_t page, PageEncoding encoding, uint32_t layer, uint32_t head) {
      FillBlock({memory_.data() + Offset(page, encoding, layer, head),
                 kGeometry.HeadBlockBytes(encoding)},
                kSalt, page, encoding, layer, head);
    });
  }

  static bool Has(uint32_t page, PageEncoding encoding) {
    return page != kOnDevice &&
           (encoding == PageEncoding::kBf16 ? page == 0 || page == kPages - 1 : page != 0);
  }
  template <typename F>
  static void ForEachBlock(F f) {
    for (uint32_t page = 0; page < kPages; ++page) {
      for (const PageEncoding encoding : {PageEncoding::kInt2, PageEncoding::kBf16}) {
        for (uint32_t layer = 0; Has(page, encoding) && layer < kGeometry.num_layers; ++layer) {
          for (uint32_t head = kHeads.first; head < kHeads.first + kHeads.count; ++head) {
            f(page, encoding, layer, head);
          }
        }
      }
    }
  }

  const std::byte* HeadBlock(PageIdx page,
                             PageEncoding encoding,
                             uint32_t layer,
                             uint32_t kv_head) const override {
    return Has(page.value(), encoding)
               ? memory_.data() + Offset(page.value(), encoding, layer, kv_head)
               : nullptr;
  }
  uint32_t first_image_layer() const override { return ordered_layers_; }
  const std::byte* GpuPage(PageIdx page, PageEncoding encoding) const override {
    return page.value() == kOnDevice && encoding == PageEncoding::kInt2 ? &device_ : nullptr;
  }
  absl::Status WaitForLayer(uint32_t /*layer*/) override { return absl::OkStatus(); }
  absl::Status Validate() override { return absl::OkStatus(); }
  size_t copied_bytes() const override { return 0; }

  static constexpr uint32_t kOnDevice = 3;

 private:
  static size_t Index(PageEncoding encoding) { return encoding == PageEncoding::kInt2 ? 0 : 1; }
  static size_t LayerBytes() { return PageOffsetInLayer(kPages, PageEncoding::kInt2); }
  // Of the page's blocks in one encoding within an ordered layer.
  static size_t PageOffsetInLayer(uint32_t page, PageEncoding encoding) {
    size_t offset = 0;
    for (uint32_t before = 0; before <= page && before < kPages; ++before) {
      for (const PageEncoding each : {PageEncoding::kInt2, PageEncoding::kBf16}) {
        if (before == page && each == encoding) {
          return offset;
        }
        offset += Has(before, each) ? kHeads.count * kGeometry.HeadBlockBytes(each) : 0;
      }
    }
    return offset;
  }
  size_t Offset(uint32_t page, PageEncoding encoding, uint32_t layer, uint32_t kv_head) const {
    const uint32_t head = kv_head - kHeads.first;
    if (layer < ordered_layers_) {
      return image_bytes_ + layer * LayerBytes() + PageOffsetInLayer(page, encoding) +
             head * kGeometry.HeadBlockBytes(encoding);
    }
    return images_[page][Index(encoding)] + kGeometry.HeadBlockOffset(encoding, layer, head);
  }

  const uint32_t ordered_layers_;
  std::vector<std::array<size_t, 2>> images_;
  const std::vector<uint32_t> order_;
  size_t image_bytes_ = 0;
  std::vector<std::byte> memory_;
  const std::byte device_{};
};

std::vector<uint32_t> InOrder() {
  std::vector<uint32_t> order(kPages);
  std::iota(order.begin(), order.end(), 0);
  return order;
}

constexpr UploadShape kShape{.geometry = kGeometry, .heads = kHeads, .num_pages = kPages};

TEST(UploadPlanTest, EveryBlockComesToItsPlaceInItsImageOnce) {
  std::vector<uint32_t> order = InOrder();
  std::mt19937 random(1);
  for (uint32_t ordered_layers = 0; ordered_layers <= kGeometry.num_layers; ++ordered_layers) {
    const LaidOut source(ordered_layers, order);
    for (const uint32_t layers_per_group : {1u, 2u, 3u, 100u}) {
      const HostUpload upload(kShape, source, layers_per_group);
      size_t bytes = 0;
      LaidOut::ForEachBlock(
          [&](uint32_t page, PageEncoding encoding, uint32_t layer, uint32_t head) {
            std::vector<std::byte> expected(kGeometry.HeadBlockBytes(encoding));
            FillBlock(expected, kSalt, page, encoding, layer, head);
            const std::byte* const block = upload.HeadBlock(PageIdx(page), encoding, layer, head);
            ASSERT_NE(block, nullptr);
            EXPECT_EQ(std::memcmp(block, expected.data(), expected.size()), 0)
                << "page " << page << " layer " << layer << " head " << head << ", "
                << ordered_layers << " layers in order, " << layers_per_group << " a group";
            bytes += expected.size();
          });
      EXPECT_EQ(upload.copied_bytes(), bytes);
    }
    std::shuffle(order.begin(), order.end(), random);
  }
}

TEST(UploadPlanTest, PagesThatLieTogetherInAnyOrderAreOneCopyAGroup) {
  std::vector<uint32_t> order = InOrder();
  std::mt19937 random(2);
  for (int i = 0; i < 20; ++i) {
    // The first page has no INT2 and the last one has both encodings, so that there are at most
    // three runs of INT2 and two of BF16.
    EXPECT_LE(HostUpload(kShape, LaidOut(0, order), 100).num_copies(), 5u);
    std::shuffle(order.begin(), order.end(), random);
  }
}

TEST(UploadPlanTest, PagesOnTheDeviceStayThereAndOthersAreNot) {
  const LaidOut source(0, InOrder());
  UploadPlan plan(kShape, &source);
  std::vector<std::byte> memory(plan.bytes());
  plan.PlaceAt(memory.data());
  const std::vector<UploadPlan::Addresses> pages = plan.AddressesOfPages();
  EXPECT_EQ(pages[LaidOut::kOnDevice].int2,
            source.GpuPage(PageIdx(LaidOut::kOnDevice), PageEncoding::kInt2));
  EXPECT_EQ(pages[LaidOut::kOnDevice].bf16, nullptr);
  EXPECT_EQ(pages[0].int2, nullptr);
  EXPECT_NE(pages[0].bf16, nullptr);
}

}  // namespace
}  // namespace crumb::testing
