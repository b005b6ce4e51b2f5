// SPDX-License-Identifier: Apache-2.0
//
// An upload from a source in host memory to the pretended GPU.
#include "client/transport/page_upload.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "proto/base/crc32c.h"
#include "proto/base/status_macros.h"
#include "tests/support/fake_gpu.h"

namespace crumb {
namespace {

using testing::HasSubstr;

constexpr Geometry kGeometry{.num_layers = 5, .num_kv_heads = 2, .key_dim = 64, .value_dim = 64};
constexpr uint32_t kPages = 3;
constexpr UploadShape kShape{.geometry = kGeometry, .heads = {0, 2}, .num_pages = kPages};

// Images in INT2, one after the other.
class HostSource : public PageSource {
 public:
  HostSource() : memory_(kPages * bytes()) {
    for (size_t i = 0; i < memory_.size(); ++i) {
      memory_[i] = static_cast<std::byte>(i * 11 / 7);
    }
  }
  static size_t bytes() { return kGeometry.PageBytes(PageEncoding::kInt2); }
  const std::byte* image(uint32_t page) const { return memory_.data() + page * bytes(); }

  const std::byte* HeadBlock(PageIdx page,
                             PageEncoding encoding,
                             uint32_t layer,
                             uint32_t kv_head) const override {
    return encoding != PageEncoding::kInt2
               ? nullptr
               : image(page.value()) + kGeometry.HeadBlockOffset(encoding, layer, kv_head);
  }
  std::vector<uint32_t> UncheckedCrc32c(PageIdx page, PageEncoding encoding) const override {
    std::vector<uint32_t> checksums;
    const size_t range = kGeometry.HeadRangeBytes(encoding);
    for (uint32_t head = 0; encoding == PageEncoding::kInt2 && head < 2; ++head) {
      checksums.push_back(Crc32c({image(page.value()) + head * range, range}) + error);
    }
    return checksums;
  }
  void SetChecked(PageIdx /*page*/, PageEncoding /*encoding*/) override { ++num_checked; }
  absl::Status RegisterWithGpu() override { return FakeGpu::Call("registering"); }
  absl::Status WaitForLayer(uint32_t /*layer*/) override { return absl::OkStatus(); }
  absl::Status Validate() override { return valid; }
  size_t copied_bytes() const override { return 0; }

  uint32_t error = 0;
  uint32_t num_checked = 0;
  absl::Status valid;

 private:
  std::vector<std::byte> memory_;
};

absl::StatusOr<std::unique_ptr<PageUpload>> Start(HostSource* source) {
  return PageUpload::Start(kShape, /*gpu=*/0, {.layers_per_group = 2}, source);
}

TEST(PageUploadTest, CallThatFailsIsAStatusAndNothingIsKeptOrReadAfterIt) {
  const size_t before = FakeGpu::allocated_bytes();
  uint64_t num_refused = 0;
  const uint64_t num_calls = FakeGpu::FailEachCall(
      [&] {
        // Gone when the action ends: whatever reads it later reads freed memory.
        const auto source = std::make_unique<HostSource>();
        CRUMB_ASSIGN_OR_RETURN(const std::unique_ptr<PageUpload> upload, Start(source.get()));
        CRUMB_RETURN_IF_ERROR(upload->DelayUntilLayer(kGeometry.num_layers - 1, nullptr));
        CRUMB_RETURN_IF_ERROR(upload->Validate());
        for (uint32_t page = 0; page < kPages; ++page) {
          EXPECT_TRUE(std::equal(source->image(page), source->image(page) + HostSource::bytes(),
                                 upload->Page(PageIdx(page), PageEncoding::kInt2)));
        }
        EXPECT_TRUE(source->num_checked == kPages || source->num_checked == 0);
        return absl::OkStatus();
      },
      [&](const absl::Status& status) {
        EXPECT_TRUE(status.ok() || absl::IsResourceExhausted(status)) << status;
        num_refused += status.ok() ? 0u : 1u;
        EXPECT_EQ(FakeGpu::allocated_bytes(), before) << status;
        EXPECT_EQ(FakeGpu::num_waiting(), 0u) << status;
      });
  EXPECT_GT(num_calls, 15u);
  // Without memory for checksums the source checks, and without registration copies are slower.
  EXPECT_LT(num_refused, num_calls - 3);
  EXPECT_GT(num_refused, 10u);
}

TEST(PageUploadTest, ErrorsOfTheStartNameTheGpuAndTheBytes) {
  HostSource source;
  FakeGpu::FailCall(2);  // After the device and the stream: the memory.
  const absl::Status status = Start(&source).status();
  EXPECT_TRUE(FakeGpu::TakeFailed());
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("copying " + std::to_string(kPages * HostSource::bytes()) +
                        " bytes of a prefix to GPU 0"));
}

TEST(PageUploadTest, CopyWithAnotherChecksumIsALossAndAPageGivenUpIsNot) {
  HostSource source;
  source.error = 1;
  const auto upload = Start(&source);
  ASSERT_TRUE(upload.ok()) << upload.status();
  EXPECT_EQ((*upload)->Validate().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(source.num_checked, 0u);
  source.valid = absl::FailedPreconditionError("the lease is over");
  EXPECT_EQ((*upload)->Validate().code(), absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace crumb
