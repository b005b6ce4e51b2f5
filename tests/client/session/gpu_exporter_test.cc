// SPDX-License-Identifier: Apache-2.0
//
// Pages of an engine's GPU memory on their way to a publish, on the pretended GPU.
#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "client/session/page_exporter.h"
#include "proto/base/crc32c.h"
#include "proto/base/status_macros.h"
#include "tests/support/fake_gpu.h"

namespace crumb {
namespace {

using testing::Each;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr uint32_t kPages = 3;
constexpr uint32_t kHeads = 2;
constexpr size_t kImageBytes = 2048;
constexpr std::byte kSomebodyElses{0x77};

// Pages at any addresses.
class Pages : public GpuPages {
 public:
  uint32_t length() const override { return kPages * kPageTokens; }
  const std::byte* Page(PageIdx page, PageEncoding /*encoding*/) const override {
    return addresses[page.value()];
  }
  absl::Status Validate() const override { return valid; }

  std::vector<const std::byte*> addresses;
  absl::Status valid;
};

class GpuExporterTest : public testing::Test {
 protected:
  GpuExporterTest() {
    for (size_t i = 0; i < memory_->bytes(); ++i) {
      memory_->data()[i] = static_cast<std::byte>(i * 7 / 3);
    }
    for (uint32_t page = 0; page < kPages; ++page) {
      pages_.addresses.push_back(memory_->data() + page * kImageBytes);
    }
  }
  std::span<std::byte> Image(uint32_t page) {
    return std::span(images_).subspan(page * kImageBytes, kImageBytes);
  }
  absl::StatusOr<std::vector<uint32_t>> Export() {
    CRUMB_ASSIGN_OR_RETURN(const std::unique_ptr<GpuExporter> exporter,
                           GpuExporter::Create(pages_));
    for (uint32_t page = 0; page < kPages; ++page) {
      CRUMB_RETURN_IF_ERROR(exporter->ExportPage(PageIdx(page), PageEncoding::kInt2, Image(page)));
    }
    return exporter->Finish(kHeads);
  }
  // After an error whoever owns the images may use them.
  void ExpectImagesAreLeftAlone() {
    std::fill(images_.begin(), images_.end(), kSomebodyElses);
    FakeGpu::Finish();
    EXPECT_THAT(images_, Each(kSomebodyElses));
  }
  std::string Refusal() {
    const auto exported = Export();
    EXPECT_FALSE(exported.ok());
    ExpectImagesAreLeftAlone();
    return exported.status().ToString();
  }

  const std::unique_ptr<OwnGpuMemory> memory_ = *OwnGpuMemory::Create(kPages * kImageBytes);
  Pages pages_;
  std::vector<std::byte> images_ = std::vector<std::byte>(kPages * kImageBytes);
};

TEST_F(GpuExporterTest, ImagesAndChecksumsAreThoseOfThePages) {
  const auto checksums = Export();
  ASSERT_TRUE(checksums.ok()) << checksums.status();
  EXPECT_TRUE(std::equal(images_.begin(), images_.end(), memory_->data()));
  ASSERT_EQ(checksums->size(), kPages * kHeads);
  const size_t range_bytes = kImageBytes / kHeads;
  for (size_t range = 0; range < checksums->size(); ++range) {
    EXPECT_EQ((*checksums)[range], Crc32c({images_.data() + range * range_bytes, range_bytes}));
  }
}

TEST_F(GpuExporterTest, PageThatIsNotWhatItShouldBeIsNamedAndNoImageIsWrittenAfterIt) {
  const std::byte* const good = pages_.addresses[2];
  pages_.addresses[2] = nullptr;
  EXPECT_THAT(Refusal(), HasSubstr("NOT_FOUND: page 2 is not held on the GPU any more"));
  pages_.addresses[2] = images_.data();
  EXPECT_THAT(Refusal(), HasSubstr("INVALID_ARGUMENT: page 2: address"));
  // A kernel that reads 16 bytes at a time would fault on it.
  pages_.addresses[2] = good - 8;
  EXPECT_THAT(Refusal(), HasSubstr("is not a multiple of 16"));
  pages_.addresses[2] = good + 16;  // Its end is in nothing.
  EXPECT_THAT(Refusal(), HasSubstr("is in no memory of a GPU"));
  pages_.addresses[2] = good;
  pages_.valid = absl::InvalidArgumentError("K holds NaN");
  EXPECT_THAT(Refusal(), HasSubstr("K holds NaN"));
  pages_.valid = absl::OkStatus();
  EXPECT_TRUE(Export().ok());
}

TEST_F(GpuExporterTest, CallThatFailsIsAStatusOrLeavesTheChecksumsToTheHost) {
  const size_t before = FakeGpu::allocated_bytes();
  std::vector<uint32_t> checksums;
  const auto run = [&] {
    auto exported = Export();
    checksums = exported.value_or(std::vector<uint32_t>());
    return exported.status();
  };
  uint64_t num_without = 0;
  const uint64_t num_calls = FakeGpu::FailEachCall(run, [&](const absl::Status& status) {
    EXPECT_TRUE(status.ok() || absl::IsResourceExhausted(status)) << status;
    EXPECT_EQ(FakeGpu::allocated_bytes(), before);
    if (status.ok()) {
      EXPECT_TRUE(std::equal(images_.begin(), images_.end(), memory_->data()));
      num_without += checksums.empty() ? 1u : 0u;
    }
    ExpectImagesAreLeftAlone();
  });
  EXPECT_GT(num_calls, kPages + 4);
  EXPECT_GE(num_without, 4u) << "memory, table, launch and results of the checksums";
}

}  // namespace
}  // namespace crumb
