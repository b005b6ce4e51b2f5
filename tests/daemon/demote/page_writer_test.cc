// SPDX-License-Identifier: Apache-2.0
#include "daemon/demote/page_writer.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "crumb/cuda/demote.h"
#include "proto/base/bfloat16.h"
#include "proto/base/crc32c.h"
#include "tests/daemon/demote/touchy_source.h"
#include "tests/support/fake_demoter.h"
#include "tests/support/test_profile.h"

namespace crumb {
namespace {

using testing::AllOf;
using testing::HasSubstr;

// An engine that holds heads 1 and 2 of four. With these layers, one head is several pages of
// memory in either encoding.
constexpr HeadRange kHeads{1, 2};
constexpr uint32_t kLayers = 4;

// Who demotes: what is written is the same.
struct Way {
  std::string name;
  bool by_device = true;
  uint32_t max_heads = 64;
  bool holds_staging = false;
  absl::Status fails_to_open = absl::OkStatus();
  absl::Status fails_to_send = absl::OkStatus();
  absl::Status fails_to_finish = absl::OkStatus();

  bool fails() const { return !(fails_to_open.ok() && fails_to_send.ok() && fails_to_finish.ok()); }
};

class PageWriterTest : public testing::TestWithParam<Way> {
 protected:
  PageWriterTest() {
    demoter_.max_heads = GetParam().max_heads;
    demoter_.fails_to_open = GetParam().fails_to_open;
    demoter_.fails_to_send = GetParam().fails_to_send;
    demoter_.fails_to_finish = GetParam().fails_to_finish;
  }

  size_t HeadBytes(PageEncoding encoding) const {
    return profile_->geometry().HeadRangeBytes(encoding);
  }
  size_t ImageBytes(PageEncoding encoding) const { return kHeads.count * HeadBytes(encoding); }

  // Normal rows, as a model could make them.
  std::vector<std::byte> Bf16Image(uint32_t seed) const {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<std::byte> image(ImageBytes(PageEncoding::kBf16));
    for (size_t i = 0; i < image.size(); i += sizeof(BFloat16)) {
      const BFloat16 value = BFloat16::FromFloat(normal(random));
      std::memcpy(&image[i], &value, sizeof(value));
    }
    return image;
  }
  std::vector<std::byte> Demoted(PageIdx page, std::span<const std::byte> bf16) const {
    std::vector<std::byte> image(ImageBytes(PageEncoding::kInt2));
    EXPECT_TRUE(DemotePage(*profile_, kHeads, page.value() * kPageTokens, bf16, image).ok());
    return image;
  }

  // Puts the image into staging memory, and says so.
  StagedPage Stage(uint32_t page, StagedEncoding encoding, std::span<const std::byte> image) {
    StagedPage staged{PageIdx(page), encoding, staging_.size(), {}};
    staging_.insert(staging_.end(), image.begin(), image.end());
    const size_t head_bytes = image.size() / kHeads.count;
    for (uint32_t head = 0; head < kHeads.count; ++head) {
      staged.head_crc32c.push_back(Crc32c(image.subspan(head * head_bytes, head_bytes)));
    }
    return staged;
  }

  // The blocks that wait for bytes.
  WritableBlock Missing(uint32_t page, PageEncoding encoding) {
    memory_.push_back(std::make_unique<std::vector<std::byte>>(ImageBytes(encoding)));
    return {{PageIdx(page), encoding}, *memory_.back()};
  }

  absl::Status PlanError(const std::vector<StagedPage>& staged,
                         const std::vector<WritableBlock>& missing) const {
    return PlanPages(owner_, staged, missing, staging_.size()).status();
  }
  // Plans one page, and writes it.
  absl::Status Write(const std::vector<StagedPage>& staged,
                     const std::vector<WritableBlock>& missing) {
    return WriteFrom(staging_, staged, missing);
  }
  absl::Status WriteFrom(std::span<const std::byte> staging,
                         const std::vector<StagedPage>& staged,
                         const std::vector<WritableBlock>& missing) {
    written_.clear();
    const auto tasks = PlanPages(owner_, staged, missing, staging.size());
    if (!tasks.ok()) {
      return tasks.status();
    }
    EXPECT_EQ(tasks->size(), 1u);
    const PageTask& task = tasks->front();
    const PageDevice device{.demoter = GetParam().by_device ? &demoter_ : nullptr,
                            .holds_staging = GetParam().holds_staging};
    WrittenPage written;
    const absl::Status status = WritePage(owner_, task, staging, device, scratch_, written);
    const bool demotes = task.int2_block != nullptr && task.staged_int2 == nullptr;
    if (status.ok()) {
      const bool by_device =
          GetParam().by_device && GetParam().max_heads > 0 && !GetParam().fails();
      EXPECT_EQ(written.demoted_by, !demotes    ? DemotedBy::kNone
                                    : by_device ? DemotedBy::kDevice
                                                : DemotedBy::kCpu);
      EXPECT_EQ(written.device_error.ok(), !(demotes && GetParam().fails()));
    }
    written_ = std::move(written.blocks);
    return status;
  }
  // The checksums that go with a block are those of its bytes.
  void ExpectTrueChecksums(const WritableBlock& block, const WrittenBlock& written) const {
    EXPECT_EQ(written.page, block.key.page);
    EXPECT_EQ(written.encoding, block.key.encoding);
    ASSERT_EQ(written.head_crc32c.size(), kHeads.count);
    const size_t head_bytes = HeadBytes(block.key.encoding);
    for (uint32_t head = 0; head < kHeads.count; ++head) {
      EXPECT_EQ(written.head_crc32c[head],
                Crc32c(block.bytes.subspan(head * head_bytes, head_bytes)));
    }
  }
  static bool Holds(const WritableBlock& block, std::span<const std::byte> image) {
    return std::equal(block.bytes.begin(), block.bytes.end(), image.begin(), image.end());
  }

  const std::shared_ptr<const Profile> profile_ = MakeTestProfile(
      {.geometry = {.num_layers = kLayers, .num_kv_heads = 4, .key_dim = 32, .value_dim = 64}});
  const PageOwner owner_{*profile_, kHeads};
  std::vector<std::byte> staging_ = std::vector<std::byte>(64);  // Offset 0 is no one's.
  std::vector<std::unique_ptr<std::vector<std::byte>>> memory_;
  DemoteScratch scratch_;
  FakeDemoter demoter_;
  std::vector<WrittenBlock> written_;
};

TEST_P(PageWriterTest, Int2IsKeptAsItCame) {
  const auto image = Demoted(PageIdx(3), Bf16Image(1));
  const WritableBlock block = Missing(3, PageEncoding::kInt2);
  const absl::Status status = Write({Stage(3, StagedEncoding::kInt2, image)}, {block});
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_TRUE(Holds(block, image));
  ASSERT_EQ(written_.size(), 1u);
  ExpectTrueChecksums(block, written_[0]);
}

TEST_P(PageWriterTest, Bf16OfTheTailIsKeptAndDemoted) {
  const auto rows = Bf16Image(2);
  const WritableBlock int2 = Missing(5, PageEncoding::kInt2);
  const WritableBlock bf16 = Missing(5, PageEncoding::kBf16);
  const absl::Status status = Write({Stage(5, StagedEncoding::kBf16, rows)}, {int2, bf16});
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_TRUE(Holds(bf16, rows));
  EXPECT_TRUE(Holds(int2, Demoted(PageIdx(5), rows)));
  ASSERT_EQ(written_.size(), 2u);
  ExpectTrueChecksums(int2, written_[0]);
  ExpectTrueChecksums(bf16, written_[1]);
}

TEST_P(PageWriterTest, Bf16IsDemotedWhereOnlyInt2IsMissing) {
  const auto rows = Bf16Image(3);
  const WritableBlock int2 = Missing(7, PageEncoding::kInt2);
  const absl::Status status = Write({Stage(7, StagedEncoding::kBf16, rows)}, {int2});
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_TRUE(Holds(int2, Demoted(PageIdx(7), rows)));
  ASSERT_EQ(written_.size(), 1u);
  ExpectTrueChecksums(int2, written_[0]);
}

TEST_P(PageWriterTest, PlainBf16IsRotatedFirst) {
  const auto plain = Bf16Image(4);
  std::vector<std::byte> rotated(plain.size());
  ASSERT_TRUE(RotatePage(*profile_, kHeads, 5 * kPageTokens, plain, rotated).ok());
  const WritableBlock int2 = Missing(5, PageEncoding::kInt2);
  const WritableBlock bf16 = Missing(5, PageEncoding::kBf16);
  const absl::Status status = Write({Stage(5, StagedEncoding::kBf16Plain, plain)}, {int2, bf16});
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_TRUE(Holds(bf16, rotated));
  EXPECT_TRUE(Holds(int2, Demoted(PageIdx(5), rotated)));
}

TEST_P(PageWriterTest, Int2OfTheEngineIsTakenWhereBothAreStaged) {
  const auto rows = Bf16Image(5);
  const auto int2_image = Demoted(PageIdx(5), Bf16Image(6));  // Not of these rows.
  const WritableBlock int2 = Missing(5, PageEncoding::kInt2);
  const WritableBlock bf16 = Missing(5, PageEncoding::kBf16);
  const StagedPage first = Stage(5, StagedEncoding::kInt2, int2_image);
  const StagedPage second = Stage(5, StagedEncoding::kBf16, rows);
  ASSERT_TRUE(Write({first, second}, {int2, bf16}).ok());
  EXPECT_TRUE(Holds(int2, int2_image));
  EXPECT_TRUE(Holds(bf16, rows));
}

TEST_P(PageWriterTest, OtherBytesThanAnnouncedAreDataLossWithPageHeadAndBothChecksums) {
  for (const StagedEncoding encoding :
       {StagedEncoding::kInt2, StagedEncoding::kBf16, StagedEncoding::kBf16Plain}) {
    const auto rows = Bf16Image(7);
    const auto image = encoding == StagedEncoding::kInt2 ? Demoted(PageIdx(9), rows) : rows;
    const StagedPage staged = Stage(9, encoding, image);
    // One bit of the second head, after its checksum was taken.
    const size_t head_bytes = image.size() / kHeads.count;
    staging_[staged.offset + head_bytes] ^= std::byte{1};
    const uint32_t read =
        Crc32c(std::span(staging_).subspan(staged.offset + head_bytes, head_bytes));
    const absl::Status status = Write({staged}, {Missing(9, PageEncoding::kInt2)});
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("staged page 9"), HasSubstr("KV head 2"),
                      HasSubstr(absl::StrFormat("%08x over the bytes read", read)),
                      HasSubstr(absl::StrFormat("%08x was announced", staged.head_crc32c[1]))));
    EXPECT_TRUE(written_.empty());
  }
}

TEST_P(PageWriterTest, BytesThatChangeOnceTheyWereReadAreKeptAsTheyWere) {
  for (const StagedEncoding encoding :
       {StagedEncoding::kInt2, StagedEncoding::kBf16, StagedEncoding::kBf16Plain}) {
    SCOPED_TRACE(static_cast<int>(encoding));
    const auto rows = Bf16Image(8);
    const auto int2_image = Demoted(PageIdx(5), rows);
    const std::span<const std::byte> image = encoding == StagedEncoding::kInt2 ? int2_image : rows;
    const StagedPage staged = Stage(5, encoding, image);
    const WritableBlock quiet = Missing(5, PageEncoding::kInt2);
    ASSERT_TRUE(Write({staged}, {quiet}).ok());

    // The first value turns into a NaN when the next page of memory is read.
    TouchySource source(staging_, staged.offset);
    source.ChangeWhenRead(staged.offset, staged.offset + 5000);
    const WritableBlock block = Missing(5, PageEncoding::kInt2);
    const absl::Status status = WriteFrom(source.bytes(), {staged}, {block});
    EXPECT_TRUE(source.has_changed());
    if (status.ok()) {
      EXPECT_TRUE(Holds(block, quiet.bytes));
      ExpectTrueChecksums(block, written_[0]);
    } else {  // A copy may go backwards.
      EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    }
  }
}

TEST_P(PageWriterTest, BytesThatChangeBeforeTheyAreReadAreDataLoss) {
  const auto rows = Bf16Image(8);
  const StagedPage staged = Stage(5, StagedEncoding::kBf16, rows);
  TouchySource source(staging_, staged.offset);
  const size_t last = staged.offset + rows.size() / kHeads.count - sizeof(uint16_t);
  source.ChangeWhenRead(last, last);
  const absl::Status status =
      WriteFrom(source.bytes(), {staged}, {Missing(5, PageEncoding::kInt2)});
  EXPECT_TRUE(source.has_changed());
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
}

TEST_P(PageWriterTest, NotFiniteRowsAreRefusedWithLayerHeadAndToken) {
  for (const StagedEncoding encoding : {StagedEncoding::kBf16, StagedEncoding::kBf16Plain}) {
    for (const uint16_t bits : {uint16_t{0x7fc0}, uint16_t{0x7f80}, uint16_t{0xff80}}) {
      auto rows = Bf16Image(9);
      // Head 2, layer 1, V of token 10.
      const Geometry& geometry = profile_->geometry();
      const size_t block =
          HeadBytes(PageEncoding::kBf16) + geometry.HeadBlockBytes(PageEncoding::kBf16);
      const size_t value = geometry.Bf16Block().value_offset() + 2 * (10 * geometry.value_dim + 3);
      std::memcpy(&rows[block + value], &bits, sizeof(bits));
      // Kept as it is, as pages of the sink are, and demoted.
      for (const PageEncoding missing : {PageEncoding::kBf16, PageEncoding::kInt2}) {
        const absl::Status status = Write({Stage(2, encoding, rows)}, {Missing(2, missing)});
        EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
        EXPECT_THAT(std::string(status.message()),
                    AllOf(HasSubstr("V"), HasSubstr("layer 1"), HasSubstr("head 2"),
                          HasSubstr("138")));  // The token's position: 2 * 64 + 10.
        EXPECT_TRUE(written_.empty());
      }
    }
  }
}

TEST_P(PageWriterTest, RowsThatOverflowInTheRotationAreRefused) {
  auto plain = Bf16Image(10);
  const uint16_t largest = 0x7f7f;
  for (size_t i = 0; i < plain.size(); i += sizeof(largest)) {
    std::memcpy(&plain[i], &largest, sizeof(largest));
  }
  const absl::Status status =
      Write({Stage(0, StagedEncoding::kBf16Plain, plain)}, {Missing(0, PageEncoding::kBf16)});
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
}

TEST_P(PageWriterTest, NotFiniteScalesOfInt2AreRefusedWithLayerHeadAndToken) {
  const Geometry& geometry = profile_->geometry();
  const Int2HeadBlock layout = geometry.Int2Block();
  const size_t block = HeadBytes(PageEncoding::kInt2) + layout.bytes();  // Head 2, layer 1.
  const auto image = Demoted(PageIdx(4), Bf16Image(11));
  for (const bool is_key : {true, false}) {
    for (const size_t half : {size_t{0}, sizeof(uint16_t)}) {  // The scale, the minimum.
      for (const uint16_t bits : {uint16_t{0x7c00}, uint16_t{0xfc00}, uint16_t{0x7e01}}) {
        auto bad = image;
        const size_t meta = is_key ? layout.KeyMetaByte(63) : layout.ValueMetaByte(63);
        std::memcpy(&bad[block + meta + half], &bits, sizeof(bits));
        const absl::Status status =
            Write({Stage(4, StagedEncoding::kInt2, bad)}, {Missing(4, PageEncoding::kInt2)});
        EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
        EXPECT_THAT(std::string(status.message()),
                    AllOf(HasSubstr(is_key ? "K" : "V"), HasSubstr("layer 1"),
                          HasSubstr("KV head 2"), HasSubstr("token 319")));
        EXPECT_TRUE(written_.empty());
      }
    }
  }
}

TEST_P(PageWriterTest, PagesBeyondTheStagingMemoryAreRefusedWithTheNumbers) {
  StagedPage staged = Stage(1, StagedEncoding::kInt2, Demoted(PageIdx(1), Bf16Image(12)));
  const WritableBlock block = Missing(1, PageEncoding::kInt2);
  EXPECT_TRUE(PlanError({staged}, {block}).ok()) << "it ends where the memory does";
  for (const uint64_t offset : {staged.offset + 1, uint64_t{staging_.size()}, ~uint64_t{0}}) {
    staged.offset = offset;
    const absl::Status status = PlanError({staged}, {block});
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("staged page 1"), HasSubstr(std::to_string(offset)),
                      HasSubstr(std::to_string(staging_.size()) + " bytes")));
  }
  EXPECT_FALSE(PlanPages(owner_, std::vector{staged}, std::vector{block}, 0).ok());
}

TEST_P(PageWriterTest, ChecksumsForOtherThanTheSessionsHeadsAreRefused) {
  StagedPage staged = Stage(1, StagedEncoding::kInt2, Demoted(PageIdx(1), Bf16Image(13)));
  staged.head_crc32c.pop_back();
  EXPECT_THAT(std::string(PlanError({staged}, {Missing(1, PageEncoding::kInt2)}).message()),
              HasSubstr("1 checksums for 2 KV heads"));
}

TEST_P(PageWriterTest, PagesOutOfOrderTwiceOrUnaskedAreRefusedByName) {
  const auto image = Demoted(PageIdx(0), Bf16Image(14));
  const auto rows = Bf16Image(15);
  const std::vector<WritableBlock> missing = {Missing(1, PageEncoding::kInt2),
                                              Missing(2, PageEncoding::kInt2),
                                              Missing(2, PageEncoding::kBf16)};
  const auto int2 = [&](uint32_t page) { return Stage(page, StagedEncoding::kInt2, image); };
  const auto bf16 = [&](uint32_t page) { return Stage(page, StagedEncoding::kBf16, rows); };
  const auto plain = [&](uint32_t page) { return Stage(page, StagedEncoding::kBf16Plain, rows); };
  const auto refusal = [&](const std::vector<StagedPage>& staged) {
    const absl::Status status = PlanError(staged, missing);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_TRUE(PlanError({int2(1), int2(2), bf16(2)}, missing).ok());
  EXPECT_THAT(refusal({int2(2), int2(1)}),
              AllOf(HasSubstr("staged page 1"), HasSubstr("after staged page 2")));
  EXPECT_THAT(refusal({bf16(2), int2(2)}), HasSubstr("ascending order of page and encoding"));
  EXPECT_THAT(refusal({int2(1), int2(1)}), HasSubstr("staged already"));
  EXPECT_THAT(refusal({bf16(2), plain(2)}), HasSubstr("staged already"));
  EXPECT_THAT(refusal({int2(3)}), AllOf(HasSubstr("staged page 3"), HasSubstr("not asked for")));
  EXPECT_THAT(refusal({int2(1), bf16(1)}), HasSubstr("(BF16) was not asked for"));
}

TEST_P(PageWriterTest, BlocksThatNothingFillsAreLeftToTheStore) {
  const auto tasks = PlanPages(owner_, std::vector<StagedPage>{},
                               std::vector{Missing(1, PageEncoding::kInt2)}, staging_.size());
  ASSERT_TRUE(tasks.ok()) << tasks.status();
  EXPECT_THAT(*tasks, testing::IsEmpty());
}

const absl::Status kDeviceIsGone = absl::InternalError("the device is gone");

INSTANTIATE_TEST_SUITE_P(
    Ways,
    PageWriterTest,
    testing::Values(Way{.name = "Cpu", .by_device = false},
                    Way{.name = "Device"},
                    Way{.name = "DeviceHeadByHead", .max_heads = 1},
                    Way{.name = "DeviceThatReadsStagingItself", .holds_staging = true},
                    Way{.name = "DeviceThatReadsStagingItselfAndFails",
                        .holds_staging = true,
                        .fails_to_finish = kDeviceIsGone},
                    Way{.name = "DeviceOfOtherGeometries", .max_heads = 0},
                    Way{.name = "DeviceThatDoesNotOpen", .fails_to_open = kDeviceIsGone},
                    Way{.name = "DeviceThatDoesNotCopy", .fails_to_send = kDeviceIsGone},
                    Way{.name = "DeviceThatDoesNotFinish", .fails_to_finish = kDeviceIsGone},
                    Way{.name = "DeviceThatFailsWithTheFirstHead",
                        .max_heads = 1,
                        .fails_to_finish = kDeviceIsGone}),
    [](const auto& way) { return way.param.name; });

}  // namespace
}  // namespace crumb
