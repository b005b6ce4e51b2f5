// SPDX-License-Identifier: Apache-2.0
//
// The engine over a small random model and a cache that lives in the test.
#include "client/example/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "client/example/gguf_file.h"
#include "client/example/model_profile.h"
#include "proto/page/usable_length.h"
#include "tests/client/example/tiny_llama.h"

namespace crumb::example {
namespace {

using Image = std::vector<std::byte>;
using Pages = std::vector<std::map<PageEncoding, Image>>;

// Pages of one published prefix.
class FakePrefix : public PrefixHandle {
 public:
  FakePrefix(const Pages& pages, uint32_t num_pages, const Profile& profile, absl::Status state)
      : pages_(pages), num_pages_(num_pages), profile_(profile), state_(std::move(state)) {}

  const ProfileId& profile_id() const override { return profile_.id(); }

  uint32_t num_pages() const override { return num_pages_; }
  const std::byte* HeadBlock(PageIdx page,
                             PageEncoding encoding,
                             uint32_t layer,
                             uint32_t kv_head) const override {
    const auto found = pages_[page.value()].find(encoding);
    return found == pages_[page.value()].end()
               ? nullptr
               : found->second.data() +
                     profile_.geometry().HeadBlockOffset(encoding, layer, kv_head);
  }
  absl::Status WaitForLayer(uint32_t /*layer*/) override { return absl::OkStatus(); }
  absl::Status Validate() override { return state_; }
  uint32_t usable_tokens() const override { return num_pages_ * kPageTokens; }
  uint32_t matched_tokens() const override { return usable_tokens(); }
  uint32_t trimmed_tokens() const override { return 0; }
  DataPlane data_plane() const override { return DataPlane::kMap; }
  size_t copied_bytes() const override { return 0; }
  absl::Status CopyPage(PageIdx /*page*/,
                        PageEncoding /*encoding*/,
                        std::span<std::byte> /*image*/) override {
    return absl::UnimplementedError("no engine needs it here");
  }

 private:
  const Pages& pages_;
  const uint32_t num_pages_;
  const Profile& profile_;
  const absl::Status state_;
};

// Remembers one prefix, in whatever encodings the sequence held its pages.
class FakeCache : public Client {
 public:
  explicit FakeCache(const Profile& profile) : profile_(profile) {}

  absl::Status WaitAttached(absl::Duration /*timeout*/) override { return absl::OkStatus(); }
  ClientState state() const override { return {}; }
  absl::StatusOr<std::shared_ptr<PrefixHandle>> Lookup(std::span<const uint32_t> tokens,
                                                       const LookupOptions& /*options*/) override {
    if (!lookup_status.ok()) {
      return lookup_status;
    }
    std::vector<PageContent> matched;
    for (size_t page = 0; page < pages_.size(); ++page) {
      const size_t end = (page + 1) * kPageTokens;
      if (end > tokens.size() ||
          !std::equal(tokens_.begin(), tokens_.begin() + static_cast<ptrdiff_t>(end),
                      tokens.begin())) {
        break;
      }
      matched.push_back(
          {pages_[page].contains(PageEncoding::kInt2), pages_[page].contains(PageEncoding::kBf16)});
    }
    const UsableLength usable =
        ComputeUsableLength(static_cast<uint32_t>(tokens.size()), matched, Windows{}, false);
    return std::make_shared<FakePrefix>(pages_, usable.usable_pages, profile_, prefix_status);
  }
  absl::StatusOr<PublishResult> Publish(const Sequence& sequence,
                                        std::span<const uint32_t> tokens,
                                        const PublishOptions& /*options*/) override {
    tokens_.assign(tokens.begin(), tokens.end());
    pages_.resize(tokens.size() / kPageTokens);
    for (uint32_t page = 0; page < pages_.size(); ++page) {
      for (const PageEncoding encoding : {PageEncoding::kInt2, PageEncoding::kBf16}) {
        if (sequence.HasPage(PageIdx(page), encoding)) {
          Image& image = pages_[page][encoding];
          image.resize(profile_.geometry().PageBytes(encoding));
          EXPECT_TRUE(sequence.ExportPage(PageIdx(page), encoding, image).ok());
        }
      }
    }
    return PublishResult{.pages_added = static_cast<uint32_t>(pages_.size())};
  }
  absl::StatusOr<PublishResult> PublishFromGpu(const GpuPages& /*pages*/,
                                               std::span<const uint32_t> /*tokens*/,
                                               const PublishOptions& /*options*/) override {
    return absl::UnimplementedError("an engine on a CPU has nothing there");
  }

  absl::Status lookup_status;  // Of lookups to come.
  absl::Status prefix_status;  // What their prefixes say when asked whether they are still right.

 private:
  const Profile& profile_;
  std::vector<uint32_t> tokens_;
  Pages pages_;
};

class EngineTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kVocabulary = 100;
  static constexpr uint32_t kSharedTokens = 700;  // Ten whole pages and a piece.

  void SetUp() override {
    TinyLlama tiny;
    tiny.vocabulary_size = kVocabulary;
    tiny.random = true;
    const auto path = std::filesystem::path(::testing::TempDir()) / "engine_test.gguf";
    std::ofstream(path, std::ios::binary) << tiny.Build();
    file_ = *GgufFile::Open(path);
    std::filesystem::remove(path);
    model_ = *LlamaModel::Load(*file_, /*num_threads=*/1);
    profile_ = *IdentityProfile(model_->config().geometry());
    cache_ = std::make_unique<FakeCache>(*profile_);
  }

  // Prompts that share kSharedTokens and go on in their own way.
  static Request Ask(uint32_t question) {
    Request request;
    for (uint32_t i = 0; i < kSharedTokens; ++i) {
      request.prompt.push_back(i * 7 % kVocabulary);
    }
    for (uint32_t i = 0; i < 30; ++i) {
      request.prompt.push_back((question + i * i) % kVocabulary);
    }
    request.shared_tokens = kSharedTokens;
    request.max_new_tokens = 20;
    request.end_token = kVocabulary;  // Never.
    return request;
  }
  Answer Generate(const Request& request, Client* cache) {
    auto answer = Engine(*model_, {.profile = profile_}, cache).Generate(request);
    EXPECT_TRUE(answer.ok()) << answer.status();
    return *std::move(answer);
  }
  void Publish() {
    Request request = Ask(1);
    request.publish = true;
    ASSERT_EQ(Generate(request, cache_.get()).published->pages_added, kSharedTokens / kPageTokens);
  }

  std::unique_ptr<GgufFile> file_;
  std::unique_ptr<LlamaModel> model_;
  std::shared_ptr<const Profile> profile_;
  std::unique_ptr<FakeCache> cache_;
};

TEST_F(EngineTest, AnAdoptedPrefixGivesTheAnswerThatComputingItGives) {
  Publish();
  const Answer reused = Generate(Ask(2), cache_.get());
  const Answer computed = Generate(Ask(2), nullptr);
  EXPECT_EQ(reused.reused_tokens, kSharedTokens / kPageTokens * kPageTokens);
  EXPECT_GT(reused.footprint.shared_int2_bytes, 0u);
  EXPECT_EQ(computed.reused_tokens, 0u);
  // Bit for bit: equal chunks from the prefix's end on, over equal rows.
  EXPECT_EQ(reused.tokens, computed.tokens);
}

TEST_F(EngineTest, ALostPrefixIsComputedInstead) {
  Publish();
  cache_->prefix_status = absl::FailedPreconditionError("lease over");
  const Answer answer = Generate(Ask(2), cache_.get());
  EXPECT_EQ(answer.cache_status, cache_->prefix_status);
  EXPECT_EQ(answer.reused_tokens, 0u);
  EXPECT_EQ(answer.tokens, Generate(Ask(2), nullptr).tokens);
}

TEST_F(EngineTest, ACacheOutOfReachCostsNoAnswer) {
  cache_->lookup_status = absl::UnavailableError("not attached");
  const Answer answer = Generate(Ask(3), cache_.get());
  EXPECT_EQ(answer.cache_status, cache_->lookup_status);
  EXPECT_EQ(answer.tokens.size(), 20u);
}

TEST_F(EngineTest, AMissIsNoError) {
  const Answer answer = Generate(Ask(3), cache_.get());
  EXPECT_TRUE(answer.cache_status.ok());
  EXPECT_EQ(answer.reused_tokens, 0u);
  EXPECT_EQ(answer.data_plane, DataPlane::kAuto);
}

TEST_F(EngineTest, StopsAtTheEndToken) {
  Request request = Ask(2);
  request.end_token = Generate(request, nullptr).tokens[0];
  EXPECT_TRUE(Generate(request, nullptr).tokens.empty());
}

TEST_F(EngineTest, RefusesWhatDoesNotFit) {
  Engine engine(*model_, {.profile = profile_}, nullptr);
  EXPECT_EQ(engine.Generate({}).status().code(), absl::StatusCode::kInvalidArgument);
  Request request = Ask(1);
  request.max_new_tokens = 2000;
  EXPECT_THAT(engine.Generate(request).status().message(), ::testing::HasSubstr("context of 2048"));
  request = Ask(1);
  request.prompt[5] = kVocabulary;
  EXPECT_THAT(engine.Generate(request).status().message(), ::testing::HasSubstr("token 100"));
}

}  // namespace
}  // namespace crumb::example
