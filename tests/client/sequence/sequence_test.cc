// SPDX-License-Identifier: Apache-2.0
#include "crumb/sequence.h"

#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/client/sequence/sequence_testing.h"
#include "tests/support/test_profile.h"

namespace crumb {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr uint32_t kQueryHeads = 4;
constexpr uint32_t kSink = 64;
constexpr uint32_t kRecent = 128;

std::unique_ptr<Sequence> NewSequence(const std::shared_ptr<const Profile>& profile,
                                      Sequence::Options options = {}) {
  options.profile = profile;
  options.num_query_heads = kQueryHeads;
  auto sequence = Sequence::Create(options);
  EXPECT_TRUE(sequence.ok()) << sequence.status();
  return *std::move(sequence);
}

// Outputs are sums of values of size one: the tolerance is float's over a few hundred terms, with
// room for one element that rounds to the neighbouring bfloat16 under another order of summation.
void ExpectNear(const std::vector<std::vector<float>>& found,
                const std::vector<std::vector<double>>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t layer = 0; layer < found.size(); ++layer) {
    ASSERT_EQ(found[layer].size(), expected[layer].size());
    for (size_t i = 0; i < found[layer].size(); ++i) {
      ASSERT_NEAR(static_cast<double>(found[layer][i]), expected[layer][i], 2e-3)
          << "layer " << layer << ", element " << i;
    }
  }
}

std::vector<std::byte> Export(const Sequence& sequence, uint32_t page, PageEncoding encoding) {
  std::vector<std::byte> image(sequence.profile().geometry().PageBytes(encoding));
  EXPECT_TRUE(sequence.ExportPage(PageIdx(page), encoding, image).ok());
  return image;
}

struct ModelCase {
  uint32_t chunk;  // Tokens a chunk.
  uint32_t total;
  CodecId codec = CodecId::kOscarInt2;
  bool keep_all_bf16 = false;
  uint32_t num_threads = 1;
  uint32_t value_dim = 32;
};

class SequenceModelTest : public testing::TestWithParam<ModelCase> {};

TEST_P(SequenceModelTest, AttentionEqualsTheNaiveTwinAtEveryChunk) {
  const ModelCase& test = GetParam();
  const auto profile = MakeTestProfile(
      {.geometry = {.num_layers = 2, .num_kv_heads = 2, .key_dim = 32, .value_dim = test.value_dim},
       .windows = {.sink_tokens = kSink, .recent_tokens = kRecent},
       .codec = test.codec});
  const Activations activations(*profile, kQueryHeads, test.total, /*seed=*/7);
  const auto sequence =
      NewSequence(profile, {.num_threads = test.num_threads, .keep_all_bf16 = test.keep_all_bf16});
  NaiveSequence naive(profile, kQueryHeads, test.keep_all_bf16);
  for (uint32_t done = 0; done < test.total;) {
    const uint32_t count = std::min(test.chunk, test.total - done);
    std::vector<std::vector<float>> out;
    ASSERT_TRUE(RunChunk(sequence.get(), activations, count, &out).ok());
    ExpectNear(out, naive.RunChunk(activations, count));
    done += count;
    ASSERT_EQ(sequence->length(), done);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Chunks,
    SequenceModelTest,
    testing::Values(ModelCase{.chunk = 1, .total = kSink + 2 * kRecent + 70},
                    ModelCase{.chunk = 7, .total = kSink + 2 * kRecent + 70},
                    ModelCase{.chunk = 64, .total = 512},
                    ModelCase{.chunk = 300, .total = 650},
                    ModelCase{.chunk = 50, .total = 450, .codec = CodecId::kOscarInt2Aware},
                    ModelCase{.chunk = 50, .total = 450, .codec = CodecId::kOscarInt2Tilted},
                    ModelCase{.chunk = 50, .total = 450, .keep_all_bf16 = true},
                    ModelCase{.chunk = 90, .total = 450, .num_threads = 3},
                    ModelCase{.chunk = 90, .total = 450, .value_dim = 64}));

class SequenceTest : public testing::Test {
 protected:
  std::unique_ptr<Sequence> Filled(uint32_t length, uint32_t chunk = 64) {
    auto sequence = NewSequence(profile_);
    Fill(sequence.get(), length, chunk);
    return sequence;
  }
  void Fill(Sequence* sequence, uint32_t length, uint32_t chunk = 64) {
    while (sequence->length() < length) {
      ASSERT_TRUE(
          RunChunk(sequence, activations_, std::min(chunk, length - sequence->length())).ok());
    }
  }

  std::shared_ptr<const Profile> profile_ =
      MakeTestProfile({.windows = {.sink_tokens = kSink, .recent_tokens = kRecent}});
  Activations activations_{*profile_, kQueryHeads, 1024, /*seed=*/3};
};

TEST_F(SequenceTest, PagesAreHeldInTheEncodingOfTheirRegionAtEveryLength) {
  for (const uint32_t length :
       {1u, kSink - 1, kSink, kSink + 1, kSink + kRecent - 1, kSink + kRecent, kSink + kRecent + 1,
        kSink + kRecent + 63, kSink + kRecent + 64, kSink + 2 * kRecent + 63}) {
    const auto sequence = Filled(length, 1);
    const uint32_t seen = length + 1 > kRecent ? length + 1 - kRecent : 0;
    for (uint32_t page = 0; page < 8; ++page) {
      const bool complete = (page + 1) * kPageTokens <= length;
      const bool history = page >= kSink / kPageTokens && (page + 1) * kPageTokens <= seen;
      EXPECT_EQ(sequence->HasPage(PageIdx(page), PageEncoding::kInt2), complete && history);
      EXPECT_EQ(sequence->HasPage(PageIdx(page), PageEncoding::kBf16), complete && !history);
    }
    EXPECT_EQ(sequence->footprint().bf16_equivalent_bytes, size_t{length} * 2 * 2 * 64 * 2);
  }
}

TEST_F(SequenceTest, StoredBytesDoNotDependOnHowTokensWereCutIntoChunks) {
  const auto one = Filled(512, 1);
  const auto many = Filled(512, 300);
  for (uint32_t page = 0; page < 8; ++page) {
    for (const PageEncoding encoding : {PageEncoding::kInt2, PageEncoding::kBf16}) {
      ASSERT_EQ(one->HasPage(PageIdx(page), encoding), many->HasPage(PageIdx(page), encoding));
      if (one->HasPage(PageIdx(page), encoding)) {
        EXPECT_EQ(Export(*one, page, encoding), Export(*many, page, encoding)) << page;
      }
    }
  }
}

TEST_F(SequenceTest, AdoptingContinuesTheOriginalBitForBit) {
  auto original = Filled(512);
  const auto prefix = FakePrefix::Of(*original, profile_, 8);
  auto heir = NewSequence(profile_);
  ASSERT_TRUE(heir->Adopt(prefix).ok());
  ASSERT_EQ(heir->length(), 512u);
  for (const uint32_t chunk : {1u, 7u, 64u, 200u, 1u}) {
    std::vector<std::vector<float>> expected;
    std::vector<std::vector<float>> found;
    ASSERT_TRUE(RunChunk(original.get(), activations_, chunk, &expected).ok());
    ASSERT_TRUE(RunChunk(heir.get(), activations_, chunk, &found).ok());
    ASSERT_EQ(found, expected);
  }
  for (uint32_t page = 0; page < 12; ++page) {
    for (const PageEncoding encoding : {PageEncoding::kInt2, PageEncoding::kBf16}) {
      if (original->HasPage(PageIdx(page), encoding)) {
        ASSERT_TRUE(heir->HasPage(PageIdx(page), encoding));
        EXPECT_EQ(Export(*heir, page, encoding), Export(*original, page, encoding)) << page;
      }
    }
  }
  EXPECT_THAT(prefix->layers_waited_for, testing::Contains(0u));
}

TEST_F(SequenceTest, PrefixThatTurnedBadUndoesTheChunk) {
  auto original = Filled(256);
  const auto prefix = FakePrefix::Of(*original, profile_, 4);
  auto heir = NewSequence(profile_);
  ASSERT_TRUE(heir->Adopt(prefix).ok());
  prefix->valid = absl::FailedPreconditionError("lease 7 is over");
  EXPECT_EQ(RunChunk(heir.get(), activations_, 40), prefix->valid);
  EXPECT_EQ(heir->length(), 256u);
  prefix->valid = absl::OkStatus();
  EXPECT_TRUE(RunChunk(heir.get(), activations_, 40).ok());
}

TEST_F(SequenceTest, BytesThatNeverArriveFailTheAttentionThatNeedsThem) {
  const auto prefix = FakePrefix::Of(*Filled(256), profile_, 4);
  auto heir = NewSequence(profile_);
  ASSERT_TRUE(heir->Adopt(prefix).ok());
  prefix->wait_status = absl::DeadlineExceededError("layer 0 did not arrive");
  std::vector<std::vector<float>> out;
  EXPECT_EQ(RunChunk(heir.get(), activations_, 1, &out), prefix->wait_status);
  EXPECT_EQ(heir->length(), 256u);
}

TEST_F(SequenceTest, AdoptAfterTokensIsRefusedAndAMissChangesNothing) {
  auto sequence = NewSequence(profile_);
  EXPECT_TRUE(sequence->Adopt(std::make_shared<FakePrefix>(profile_, 0)).ok());
  EXPECT_TRUE(sequence->Adopt(nullptr).ok());
  Fill(sequence.get(), 10);
  const auto prefix = FakePrefix::Of(*Filled(256), profile_, 4);
  EXPECT_EQ(sequence->Adopt(prefix).code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(SequenceTest, RetainedTailCanBeExportedInBothEncodings) {
  auto sequence = NewSequence(profile_);
  ASSERT_TRUE(sequence->RetainTail(512).ok());
  Fill(sequence.get(), 1000);
  for (const uint32_t page : {6u, 7u}) {
    EXPECT_TRUE(sequence->HasPage(PageIdx(page), PageEncoding::kInt2));
    EXPECT_TRUE(sequence->HasPage(PageIdx(page), PageEncoding::kBf16));
  }
  EXPECT_FALSE(sequence->HasPage(PageIdx(5), PageEncoding::kBf16));
  EXPECT_FALSE(sequence->HasPage(PageIdx(8), PageEncoding::kBf16));
  sequence->ReleaseTail();
  EXPECT_FALSE(sequence->HasPage(PageIdx(7), PageEncoding::kBf16));
  EXPECT_EQ(sequence->RetainTail(100).code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(SequenceTest, NanIsRefusedWithLayerHeadAndToken) {
  auto sequence = Filled(100);
  const Geometry& geometry = profile_->geometry();
  ASSERT_TRUE(sequence->BeginChunk(70).ok());
  std::vector<float> keys = activations_.Keys(1, 100, 70);
  const std::vector<float> values = activations_.Values(1, 100, 70);
  keys[(size_t{66} * geometry.num_kv_heads + 1) * geometry.key_dim + 5] =
      std::numeric_limits<float>::quiet_NaN();
  const absl::Status status = sequence->Append(1, keys, values);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("layer 1, KV head 1, token 166"));
  sequence->AbandonChunk();
  EXPECT_EQ(sequence->length(), 100u);
  Fill(sequence.get(), 512);
  EXPECT_EQ(Export(*sequence, 2, PageEncoding::kInt2),
            Export(*Filled(512), 2, PageEncoding::kInt2));
}

TEST_F(SequenceTest, InfinityInValuesIsRefusedToo) {
  auto sequence = NewSequence(profile_);
  ASSERT_TRUE(sequence->BeginChunk(1).ok());
  std::vector<float> values = activations_.Values(0, 0, 1);
  values[3] = -std::numeric_limits<float>::infinity();
  EXPECT_THAT(std::string(sequence->Append(0, activations_.Keys(0, 0, 1), values).message()),
              HasSubstr("layer 0, KV head 0, token 0"));
}

TEST_F(SequenceTest, AbandonedChunkLeavesNoTrace) {
  auto sequence = Filled(200);
  const Sequence::Footprint before = sequence->footprint();
  ASSERT_TRUE(sequence->BeginChunk(500).ok());
  ASSERT_TRUE(
      sequence->Append(0, activations_.Keys(0, 0, 500), activations_.Values(0, 0, 500)).ok());
  sequence->AbandonChunk();
  sequence->AbandonChunk();
  EXPECT_EQ(sequence->footprint().own_bf16_bytes, before.own_bf16_bytes);
  Fill(sequence.get(), 512);
  const auto straight = Filled(512);
  for (const uint32_t page : {1u, 2u, 3u, 4u, 5u}) {
    EXPECT_EQ(Export(*sequence, page, PageEncoding::kInt2),
              Export(*straight, page, PageEncoding::kInt2));
  }
}

TEST_F(SequenceTest, CallsOutOfOrderAreRefusedWithTheRemedy) {
  auto sequence = NewSequence(profile_);
  const auto keys = activations_.Keys(0, 0, 2);
  const auto values = activations_.Values(0, 0, 2);
  const auto queries = activations_.Queries(0, 0, 2);
  std::vector<float> out(queries.size());
  const auto expect = [](const absl::Status& status, absl::StatusCode code, const char* text) {
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
  };
  constexpr auto kState = absl::StatusCode::kFailedPrecondition;
  constexpr auto kArgument = absl::StatusCode::kInvalidArgument;
  expect(sequence->Append(0, keys, values), kState, "BeginChunk first");
  expect(sequence->EndChunk(), kState, "BeginChunk first");
  expect(sequence->BeginChunk(0), kArgument, "at least one");
  ASSERT_TRUE(sequence->BeginChunk(2).ok());
  expect(sequence->BeginChunk(2), kState, "EndChunk or AbandonChunk");
  expect(sequence->Append(2, keys, values), kArgument, "layer 2; the model has 2 layers");
  expect(sequence->Append(0, {keys.data(), keys.size() - 1}, values), kArgument, "[2, 2, 32]");
  expect(sequence->Attend(0, queries, out), kState, "before its Append");
  ASSERT_TRUE(sequence->Append(0, keys, values).ok());
  expect(sequence->Append(0, keys, values), kState, "appended already");
  expect(sequence->Attend(0, queries, {out.data(), 3}), kArgument, "outputs have 3");
  ASSERT_TRUE(sequence->Attend(0, queries, out).ok());
  expect(sequence->EndChunk(), kState, "layer 1 of 2 was not appended");
  EXPECT_EQ(sequence->length(), 0u);
  EXPECT_TRUE(sequence->BeginChunk(1).ok()) << "the failed chunk is undone";
}

TEST_F(SequenceTest, LengthIsBounded) {
  auto sequence = NewSequence(profile_, {.max_tokens = 100});
  Fill(sequence.get(), 90);
  const absl::Status status = sequence->BeginChunk(11);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("max_tokens"));
  auto small = NewSequence(profile_, {.max_tokens = 100});
  EXPECT_EQ(small->Adopt(FakePrefix::Of(*Filled(256), profile_, 4)).code(),
            absl::StatusCode::kResourceExhausted);
}

TEST_F(SequenceTest, OneRankHoldsItsHeadsOnly) {
  auto whole = Filled(512);
  auto rank = *Sequence::Create({.profile = profile_, .num_query_heads = 2, .heads = {1, 1}});
  const Geometry& geometry = profile_->geometry();
  for (uint32_t first = 0; first < 512; first += 64) {
    ASSERT_TRUE(rank->BeginChunk(64).ok());
    for (uint32_t layer = 0; layer < geometry.num_layers; ++layer) {
      std::vector<float> keys;
      std::vector<float> values;
      const auto all_keys = activations_.Keys(layer, first, 64);
      const auto all_values = activations_.Values(layer, first, 64);
      for (size_t token = 0; token < 64; ++token) {
        const auto at = static_cast<ptrdiff_t>((token * 2 + 1) * 32);
        keys.insert(keys.end(), all_keys.begin() + at, all_keys.begin() + at + 32);
        values.insert(values.end(), all_values.begin() + at, all_values.begin() + at + 32);
      }
      ASSERT_TRUE(rank->Append(layer, keys, values).ok());
    }
    ASSERT_TRUE(rank->EndChunk().ok());
  }
  // The rank's image is one contiguous run of the whole model's.
  const auto all = Export(*whole, 2, PageEncoding::kInt2);
  std::vector<std::byte> own(all.size() / 2);
  ASSERT_TRUE(rank->ExportPage(PageIdx(2), PageEncoding::kInt2, own).ok());
  EXPECT_TRUE(std::equal(own.begin(), own.end(), all.begin() + static_cast<ptrdiff_t>(own.size())));
}

TEST_F(SequenceTest, ExportSaysWhyItCannot) {
  const auto sequence = Filled(100);
  std::vector<std::byte> image(profile_->geometry().PageBytes(PageEncoding::kBf16));
  EXPECT_EQ(sequence->ExportPage(PageIdx(1), PageEncoding::kBf16, image).code(),
            absl::StatusCode::kNotFound)
      << "not complete";
  EXPECT_EQ(sequence->ExportPage(PageIdx(0), PageEncoding::kInt2, image).code(),
            absl::StatusCode::kInvalidArgument)
      << "image of the other encoding's size";
  image.resize(profile_->geometry().PageBytes(PageEncoding::kInt2));
  EXPECT_EQ(sequence->ExportPage(PageIdx(0), PageEncoding::kInt2, image).code(),
            absl::StatusCode::kNotFound);
}

TEST_F(SequenceTest, BadOptionsAreNamedWithTheirLimit) {
  const auto refused = [&](Sequence::Options options, const char* text) {
    const auto sequence = Sequence::Create(std::move(options));
    ASSERT_EQ(sequence.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(sequence.status().message()), HasSubstr(text));
  };
  refused({}, "profile is null");
  refused({.profile = profile_}, "num_query_heads is 0");
  refused({.profile = profile_, .num_query_heads = 3}, "num_query_heads is 3");
  refused({.profile = profile_, .num_query_heads = 130}, "at most 64 times");
  refused({.profile = profile_, .num_query_heads = 4, .heads = {1, 2}}, "heads is [1, 1 + 2)");
  refused({.profile = profile_, .num_query_heads = 4, .heads = {~0u, 2}}, "heads is");
  refused({.profile = profile_, .num_query_heads = 4, .scale = NAN}, "scale is nan");
  refused({.profile = profile_, .num_query_heads = 4, .max_tokens = 0}, "max_tokens is 0");
  refused({.profile = profile_, .num_query_heads = 4, .num_threads = 0}, "num_threads is 0");
}

}  // namespace
}  // namespace crumb
