// SPDX-License-Identifier: Apache-2.0
#include "proto/wire/pull_message.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>

namespace crumb {
namespace {

using ::testing::HasSubstr;

std::span<const std::byte> Bytes(const std::vector<std::byte>& bytes) {
  return bytes;
}

template <typename Message>
std::vector<std::byte> Encoded(const Message& message) {
  const auto bytes = WireBytes(message);
  return {bytes.begin(), bytes.end()};
}

PullMessage GoodPull() {
  PullMessage pull;
  pull.preamble = {.op = PullOp::kPull, .request_id = 7};
  pull.lease_id = 3;
  pull.num_entries = 2;
  pull.chunk_bytes = 1u << 20;
  pull.geometry = {.num_layers = 36, .num_kv_heads = 8, .key_dim = 128, .value_dim = 64};
  pull.ordered_layers = 2;
  return pull;
}

TEST(PullMessageTest, EveryMessageComesBackAsItWasSent) {
  HelloMessage hello;
  hello.session_id = 5;
  hello.session_secret[15] = 0xab;
  hello.group = 9;
  const auto decoded = DecodeMessage(WireBytes(hello));
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(std::get<HelloMessage>(*decoded).session_secret, hello.session_secret);
  EXPECT_EQ(std::get<HelloMessage>(*decoded).group, hello.group);

  const auto pull = DecodeMessage(WireBytes(GoodPull()));
  ASSERT_TRUE(pull.ok()) << pull.status();
  EXPECT_EQ(std::get<PullMessage>(*pull).geometry, GoodPull().geometry);
  EXPECT_EQ(std::get<PullMessage>(*pull).preamble.request_id, 7u);

  StageMessage stage;
  stage.preamble.op = PullOp::kStage;
  stage.offset = 4096;
  stage.request_bytes = 1;
  EXPECT_TRUE(DecodeMessage(WireBytes(stage)).ok());

  ChunkMessage chunk;
  chunk.preamble.op = PullOp::kChunk;
  chunk.total_bytes = 1;
  EXPECT_TRUE(DecodeMessage(WireBytes(chunk)).ok());
}

TEST(PullMessageTest, GoldenBytesOfAPull) {
  const std::vector<std::byte> bytes = Encoded(GoodPull());
  const std::array<uint8_t, 56> golden = {'C', 'M', 'B', 'P', 3,  0, 2, 0, 7, 0, 0, 0, 0,   0,
                                          0,   0,   3,   0,   0,  0, 0, 0, 0, 0, 2, 0, 0,   0,
                                          0,   0,   16,  0,   36, 0, 0, 0, 8, 0, 0, 0, 128, 0,
                                          0,   0,   64,  0,   0,  0, 2, 0, 0, 0, 0, 0, 0,   0};
  ASSERT_EQ(bytes.size(), golden.size());
  EXPECT_EQ(std::memcmp(bytes.data(), golden.data(), golden.size()), 0);
}

TEST(PullMessageTest, StatusTravelsAndALongMessageIsCut) {
  const absl::Status status = absl::FailedPreconditionError("lease 9 is over");
  EXPECT_EQ(EndStatus(MakeEnd(1, status)), status);
  EXPECT_TRUE(EndStatus(MakeEnd(1, absl::OkStatus())).ok());
  const EndMessage cut = MakeEnd(1, absl::InternalError(std::string(1000, 'x')));
  EXPECT_EQ(EndStatus(cut).message().size(), cut.message.size());
}

TEST(PullMessageTest, AHeaderOfAnotherSizeIsRefused) {
  for (size_t size = 0; size < 64; ++size) {
    std::vector<std::byte> bytes = Encoded(GoodPull());
    const bool right = size == bytes.size();
    bytes.resize(size);
    EXPECT_EQ(DecodeMessage(Bytes(bytes)).ok(), right) << size;
  }
}

TEST(PullMessageTest, FieldsOutOfBoundsAreNamed) {
  const auto message_of = [](const PullMessage& pull) {
    return std::string(DecodeMessage(WireBytes(pull)).status().message());
  };
  PullMessage pull = GoodPull();
  pull.num_entries = kMaxPullEntries + 1;
  EXPECT_THAT(message_of(pull), HasSubstr("number of entries is 32769"));
  pull = GoodPull();
  pull.geometry.num_kv_heads = UINT32_MAX;
  EXPECT_THAT(message_of(pull), HasSubstr("geometry is 36 layers of 4294967295 KV heads"));
  pull = GoodPull();
  pull.chunk_bytes = 0;
  EXPECT_THAT(message_of(pull), HasSubstr("chunk size is 0"));
  pull = GoodPull();
  pull.ordered_layers = 0;
  EXPECT_THAT(message_of(pull), HasSubstr("ordered layers is 0, must be 1..36"));
  pull.ordered_layers = 37;
  EXPECT_THAT(message_of(pull), HasSubstr("ordered layers is 37, must be 1..36"));
  pull = GoodPull();
  pull.preamble.version = 1;
  EXPECT_THAT(message_of(pull), HasSubstr("version is 1"));
  pull = GoodPull();
  pull.preamble.magic = 0;
  EXPECT_THAT(message_of(pull), HasSubstr("magic"));
}

TEST(PullMessageTest, StagedBytesStayWithinStaging) {
  StageMessage stage;
  stage.preamble.op = PullOp::kStage;
  stage.request_bytes = 100;
  const auto is_good = [&] { return DecodeMessage(WireBytes(stage)).ok(); };
  stage.offset = kMaxStagingBytes - 100;
  EXPECT_TRUE(is_good());
  stage.offset = kMaxStagingBytes - 99;
  EXPECT_FALSE(is_good());
  stage.offset = kMaxStagingBytes - 1;
  stage.request_offset = 99;  // The last byte of the request that fits.
  EXPECT_TRUE(is_good());
  stage.offset = 98;  // A piece cannot lie before its request's begin.
  EXPECT_FALSE(is_good());
  stage = {.preamble = stage.preamble, .request_bytes = kMaxStagingBytes + 1};
  EXPECT_FALSE(is_good());
  stage.request_bytes = 0;
  EXPECT_FALSE(is_good());
}

TEST(PullMessageTest, EntriesMustAscendAndBeKnown) {
  PullMessage pull = GoodPull();
  std::vector<PullEntry> entries(2);
  entries[0] = {.page_idx = 4, .generation = 2};
  entries[1] = {.page_idx = 4, .encoding = PageEncoding::kBf16, .generation = 8};
  const auto decode = [&] {
    return DecodeEntries(pull, std::as_bytes(std::span(entries))).status();
  };
  EXPECT_TRUE(decode().ok()) << decode();
  entries[1].encoding = PageEncoding::kInt2;
  EXPECT_THAT(std::string(decode().message()), HasSubstr("order of the entries"));
  entries[1] = {.page_idx = 5, .generation = 3};
  EXPECT_THAT(std::string(decode().message()), HasSubstr("generation is 3"));
  entries[1] = {.page_idx = UINT32_MAX, .generation = 2};
  EXPECT_THAT(std::string(decode().message()), HasSubstr("page is 4294967295"));
  entries[1] = {.page_idx = 5, .encoding = static_cast<PageEncoding>(9), .generation = 2};
  EXPECT_THAT(std::string(decode().message()), HasSubstr("encoding is 9"));
  entries.pop_back();
  EXPECT_THAT(std::string(decode().message()), HasSubstr("size of the entries is 16"));
}

// Whatever bytes come, the decoder answers; what it accepts is within bounds.
TEST(PullMessageTest, RandomBytesAreRefusedOrWithinBounds) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  for (int round = 0; round < 200000; ++round) {
    std::vector<std::byte> bytes(random() % 260);
    for (std::byte& byte : bytes) {
      byte = static_cast<std::byte>(random() % 4 == 0 ? random() : 0);
    }
    const Preamble preamble{.op = static_cast<PullOp>(random() % 8), .request_id = random()};
    const size_t sizes[] = {40, 48, 16, 48, 32, 248, 0, 20};
    if (random() % 4 != 0 && bytes.size() >= sizeof(preamble)) {
      bytes.resize(std::max(sizes[random() % 8], sizeof(preamble)));
      std::memcpy(bytes.data(), &preamble, sizeof(preamble));
    }
    const auto message = DecodeMessage(Bytes(bytes));
    if (!message.ok()) {
      EXPECT_EQ(message.status().code(), absl::StatusCode::kInvalidArgument);
    } else if (const auto* pull = std::get_if<PullMessage>(&*message)) {
      EXPECT_TRUE(pull->geometry.IsValid());
      EXPECT_LE(pull->chunk_bytes, kMaxChunkBytes);
      EXPECT_LE(pull->ordered_layers, pull->geometry.num_layers);
    } else if (const auto* stage = std::get_if<StageMessage>(&*message)) {
      EXPECT_LT(stage->offset, kMaxStagingBytes);
    }
  }
}

}  // namespace
}  // namespace crumb
