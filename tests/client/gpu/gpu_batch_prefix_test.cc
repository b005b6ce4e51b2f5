// SPDX-License-Identifier: Apache-2.0
//
// Prefixes that sequences on a GPU have adopted.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "crumb/gpu_batch.h"
#include "tests/client/gpu/gpu_batch_fixture.h"
#include "tests/client/sequence/sequence_testing.h"
#include "tests/support/test_profile.h"

namespace crumb {
namespace {

using testing::HasSubstr;

TEST_F(GpuBatchTest, AdoptedPrefixIsReadInPlaceAndGrownBeyond) {
  GpuScene scene(FloatOptions());
  const auto publisher = scene.NewLive(9);
  ASSERT_TRUE(publisher->cpu->RetainTail(320).ok());
  ASSERT_TRUE(publisher->gpu->RetainTail(320).ok());
  ASSERT_NO_FATAL_FAILURE(scene.Step(publisher.get(), 200));
  ASSERT_NO_FATAL_FAILURE(scene.Step(publisher.get(), 200));
  ASSERT_NO_FATAL_FAILURE(scene.ExpectSamePages(*publisher));

  const std::shared_ptr<const Profile> profile(&scene.pool().profile(), [](const Profile*) {});
  const auto on_gpu = std::make_shared<DevicePrefix>(*publisher->cpu, 5);
  const auto readers = Prefilled(&scene, {30});
  for (int i = 0; i < 2; ++i) {
    auto reader = scene.NewLive(50 + static_cast<uint32_t>(i));
    ASSERT_TRUE(reader->gpu->Adopt(on_gpu).ok());
    ASSERT_TRUE(reader->cpu->Adopt(FakePrefix::Of(*publisher->cpu, profile, 5)).ok());
    EXPECT_EQ(reader->gpu->length(), 320u);
    EXPECT_EQ(reader->gpu->footprint().own_bf16_bytes, 0u);
    EXPECT_EQ(reader->gpu->Page(PageIdx(2), PageEncoding::kInt2),
              on_gpu->GpuPage(PageIdx(2), PageEncoding::kInt2));
    const std::vector<Member> both = {{readers[0].get(), 1}, {reader.get(), 40}};
    ASSERT_NO_FATAL_FAILURE(scene.Step(both));
    for (int token = 0; token < 130; ++token) {
      ASSERT_NO_FATAL_FAILURE(
          scene.Step(std::vector<Member>{{readers[0].get(), 1}, {reader.get(), 1}}));
    }
    ASSERT_NO_FATAL_FAILURE(scene.ExpectSamePages(*reader));
    EXPECT_EQ(reader->gpu->Adopt(on_gpu).code(), absl::StatusCode::kFailedPrecondition);
  }
}

TEST_F(GpuBatchTest, PagesThatAPrefixHasInBf16AloneAreDemotedFirst) {
  GpuScene scene(FloatOptions());
  const auto publisher = scene.NewLive(9);
  ASSERT_TRUE(publisher->cpu->RetainTail(192).ok());
  ASSERT_NO_FATAL_FAILURE(scene.Step(publisher.get(), 250));
  ASSERT_NO_FATAL_FAILURE(scene.Step(publisher.get(), 250));
  const std::shared_ptr<const Profile> profile(&scene.pool().profile(), [](const Profile*) {});
  const auto prefix = std::make_shared<DevicePrefix>(*publisher->cpu, 5);
  const auto on_cpu = FakePrefix::Of(*publisher->cpu, profile, 5);
  // As a daemon that had no time to demote them.
  for (const uint32_t page : {1u, 2u}) {
    ASSERT_NE(prefix->GpuPage(PageIdx(page), PageEncoding::kBf16), nullptr);
    prefix->Drop(PageIdx(page), PageEncoding::kInt2);
  }
  const auto reader = scene.NewLive(51);
  ASSERT_TRUE(reader->gpu->Adopt(prefix).ok());
  ASSERT_TRUE(reader->cpu->Adopt(on_cpu).ok());
  for (const uint32_t tokens : {1u, 70u, 1u}) {
    ASSERT_NO_FATAL_FAILURE(scene.Step(reader.get(), tokens));
  }
  EXPECT_EQ(reader->gpu->footprint().own_int2_bytes,
            reader->cpu->footprint().own_int2_bytes + 2 * kGeometry.PageBytes(PageEncoding::kInt2));
}

TEST_F(GpuBatchTest, PrefixThatIsNoLongerValidFailsTheStepAndTheOthersAreAskedOnce) {
  GpuScene scene(Options());
  const auto publisher = scene.NewLive(9);
  ASSERT_NO_FATAL_FAILURE(scene.Step(publisher.get(), 250));
  const auto prefix = std::make_shared<DevicePrefix>(*publisher->cpu, 3);
  std::vector<std::unique_ptr<Live>> readers;
  for (uint32_t i = 0; i < 2; ++i) {
    readers.push_back(scene.NewLive(60 + i));
    ASSERT_TRUE(readers[i]->gpu->Adopt(prefix).ok());
  }
  const std::vector<Member> members = Decoding(readers);
  const auto run = [&] {
    ASSERT_TRUE(scene.Begin(members).ok());
    scene.EnqueueRows(members);
    scene.EnqueueLayers();
    ASSERT_TRUE(scene.batch().EndStep(scene.stream()).ok());
    scene.Wait();
  };
  run();
  EXPECT_TRUE(scene.batch().Validate().ok());
  EXPECT_EQ(prefix->num_validations, 1);
  prefix->valid = absl::FailedPreconditionError("lease 7 is over");
  run();
  const absl::Status status = scene.batch().Validate();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("member 0: lease 7 is over"));
  EXPECT_FALSE(readers[1]->gpu->Validate().ok());
}

// Pages of a prefix as copies that are on their way, and what is asked of it.
class RecordingUpload : public GpuUpload {
 public:
  explicit RecordingUpload(std::shared_ptr<DevicePrefix> prefix) : prefix_(std::move(prefix)) {}

  const PrefixHandle& prefix() const override { return *prefix_; }
  const std::byte* Page(PageIdx page, PageEncoding encoding) const override {
    return prefix_->GpuPage(page, encoding);
  }
  absl::Status DelayUntilLayer(uint32_t layer, GpuStream /*stream*/) const override {
    layers.push_back(layer);
    return absl::OkStatus();
  }
  size_t copied_bytes() const override { return 1; }
  const absl::Status& registration() const override { return prefix_->valid; }
  absl::Status Validate() override {
    ++num_validations;
    return prefix_->valid;
  }

  mutable std::vector<uint32_t> layers;  // That a stream was made to wait for.
  int num_validations = 0;

 private:
  const std::shared_ptr<DevicePrefix> prefix_;  // shared: with who adopts it.
};

TEST_F(GpuBatchTest, StreamOfTheFirstStepWaitsForTheLayersOfAnUpload) {
  GpuScene scene(FloatOptions());
  const auto publisher = scene.NewLive(9);
  ASSERT_NO_FATAL_FAILURE(scene.Step(publisher.get(), 250));
  const std::shared_ptr<const Profile> profile(&scene.pool().profile(), [](const Profile*) {});
  const auto prefix = std::make_shared<DevicePrefix>(*publisher->cpu, 3);
  const auto graph = scene.Capture(1);
  for (const bool is_replayed : {false, true}) {
    const auto upload = std::make_shared<RecordingUpload>(prefix);
    const auto reader = scene.NewLive(70);
    ASSERT_TRUE(reader->gpu->Adopt(prefix, upload).ok());
    ASSERT_TRUE(reader->cpu->Adopt(FakePrefix::Of(*publisher->cpu, profile, 3)).ok());
    const std::vector<Member> members = {{reader.get(), 1}};
    ASSERT_TRUE(scene.Begin(members).ok());
    scene.batch().AbandonStep();
    EXPECT_TRUE(upload->layers.empty());
    if (is_replayed) {
      ASSERT_NO_FATAL_FAILURE(scene.Replay(members, graph.get()));
    } else {
      ASSERT_NO_FATAL_FAILURE(scene.Step(members));
    }
    EXPECT_EQ(upload->layers,
              (is_replayed ? std::vector<uint32_t>{1} : std::vector<uint32_t>{0, 1}));
    EXPECT_EQ(upload->num_validations, 1);
    ASSERT_NO_FATAL_FAILURE(scene.Step(members));
    EXPECT_EQ(upload->layers.size(), is_replayed ? 1u : 2u) << "all of it was waited for";
    EXPECT_EQ(upload->num_validations, 2);
    EXPECT_EQ(prefix->num_validations, 0) << "the upload stands for it";
  }
}

TEST_F(GpuBatchTest, RecentWindowThatIsOnTheGpuAtTwoBitsAloneIsNotAdoptedInSilence) {
  GpuScene scene(FloatOptions());
  const auto publisher = scene.NewLive(9);
  ASSERT_TRUE(publisher->cpu->RetainTail(192).ok());
  ASSERT_NO_FATAL_FAILURE(scene.Step(publisher.get(), 250));
  ASSERT_NO_FATAL_FAILURE(scene.Step(publisher.get(), 250));
  const auto prefix = std::make_shared<DevicePrefix>(*publisher->cpu, 3);
  ASSERT_NE(prefix->GpuPage(PageIdx(2), PageEncoding::kInt2), nullptr);
  ASSERT_NE(prefix->GpuPage(PageIdx(2), PageEncoding::kBf16), nullptr);
  // As right after a publish, before the daemon has copied the tail up.
  prefix->MoveToHost(PageIdx(2));
  const auto reader = scene.NewSequence();
  const absl::Status refused = reader->Adopt(prefix);
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("page 2 (tokens 128 to 191) of the prefix is not on the GPU in BF16, which "
                        "the recent window needs"));
  // Of one that has no such rows, anywhere, the engine has said that it takes the codes.
  prefix->Drop(PageIdx(2), PageEncoding::kBf16);
  EXPECT_TRUE(reader->Adopt(prefix).ok());
}

TEST_F(GpuBatchTest, PrefixThatCannotBeAdoptedIsRefusedByNameAndTheSequenceGoesOn) {
  GpuScene scene(FloatOptions());
  const auto publisher = scene.NewLive(9);
  ASSERT_NO_FATAL_FAILURE(scene.Step(publisher.get(), 250));
  const auto prefix = std::make_shared<DevicePrefix>(*publisher->cpu, 3);
  const auto live = scene.NewLive(71);
  const auto refuse = [&](GpuSequence* sequence, const std::shared_ptr<DevicePrefix>& refused,
                          absl::StatusCode code, const std::string& words) {
    const absl::Status status = sequence->Adopt(refused);
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(words));
    EXPECT_EQ(sequence->length(), 0u);
  };
  GpuSceneOptions other_options = Options();
  other_options.profile = MakeTestProfile({.geometry = kGeometry, .windows = kWindows});
  GpuScene other(other_options);
  const auto stranger = other.NewLive(9);
  ASSERT_NO_FATAL_FAILURE(other.Step(stranger.get(), 70));
  refuse(live->gpu.get(), std::make_shared<DevicePrefix>(*stranger->cpu, 1),
         absl::StatusCode::kFailedPrecondition, other.pool().profile().id().Short());
  refuse(scene.NewSequence(/*max_tokens=*/191).get(), prefix, absl::StatusCode::kResourceExhausted,
         "192 tokens, the sequence may have 191");
  const auto lacking = std::make_shared<DevicePrefix>(*publisher->cpu, 3);
  lacking->Drop(PageIdx(1), PageEncoding::kInt2);
  lacking->Drop(PageIdx(1), PageEncoding::kBf16);
  refuse(live->gpu.get(), lacking, absl::StatusCode::kFailedPrecondition,
         "page 1 (tokens 64 to 127) of the prefix is not on the GPU");
  // A rank that has one of the two heads, and clients of other GPUs.
  const auto of_rank = std::make_shared<DevicePrefix>(*publisher->cpu, 3);
  of_rank->read_heads = {1, 1};
  refuse(live->gpu.get(), of_rank, absl::StatusCode::kFailedPrecondition,
         "the prefix has KV heads 1 + 1 of each page, the pool 0 + 2");
  const auto elsewhere = std::make_shared<DevicePrefix>(*publisher->cpu, 3);
  elsewhere->on_gpu = 1;
  refuse(live->gpu.get(), elsewhere, absl::StatusCode::kFailedPrecondition,
         "the prefix is of a client on GPU 1, the pool on GPU 0");
  const absl::Status mismatched =
      live->gpu->Adopt(prefix, std::make_shared<RecordingUpload>(elsewhere));
  EXPECT_EQ(mismatched.code(), absl::StatusCode::kFailedPrecondition) << mismatched;
  EXPECT_THAT(std::string(mismatched.message()), HasSubstr("the upload is of another prefix"));
  EXPECT_EQ(live->gpu->length(), 0u);
  EXPECT_TRUE(live->gpu->Adopt(nullptr).ok()) << "a miss";
  ASSERT_NO_FATAL_FAILURE(scene.Step(live.get(), 70));
}

// Three readers of one prefix, each with something of its own.
class GpuSharedPrefixTest : public GpuBatchTest {
 protected:
  static GpuSceneOptions SharedOptions() {
    GpuSceneOptions options = FloatOptions();
    options.int2_pages = options.bf16_pages = 120;
    // The prefix is read at half precision. A token that is left out is one of 0.05.
    options.tolerance = 0.03;
    return options;
  }
  // Prefixes of one length; of another publisher each.
  static std::vector<std::unique_ptr<Live>> Readers(GpuScene* scene, uint32_t seed) {
    const auto publisher = scene->NewLive(seed);
    EXPECT_TRUE(publisher->cpu->RetainTail(384).ok());
    scene->Step(publisher.get(), 230);
    scene->Step(publisher.get(), 220);
    const std::shared_ptr<const Profile> profile(&scene->pool().profile(), [](const Profile*) {});
    const auto prefix = std::make_shared<DevicePrefix>(*publisher->cpu, 6);
    std::vector<std::unique_ptr<Live>> readers;
    for (const uint32_t own_tokens : {1u, 90u, 30u}) {
      readers.push_back(scene->NewLive(seed + own_tokens));
      EXPECT_TRUE(readers.back()->gpu->Adopt(prefix).ok());
      EXPECT_TRUE(readers.back()->cpu->Adopt(FakePrefix::Of(*publisher->cpu, profile, 6)).ok());
      scene->Step(readers.back().get(), own_tokens);
    }
    return readers;
  }
};

TEST_F(GpuSharedPrefixTest, IsReadOnceForAllAndOutputsAreTheSame) {
  GpuScene scene(SharedOptions());
  const auto readers = Readers(&scene, 1000);
  std::vector<Member> members = Decoding(readers);
  for (int i = 0; i < 150; ++i) {  // Own pages come into history, and steps between share nothing.
    ASSERT_NO_FATAL_FAILURE(scene.Step(members, /*reads_prefix_once=*/i % 5 != 4));
    if (i % 30 == 29) {
      std::rotate(members.begin(), members.begin() + 1, members.end());
    }
  }
  for (const auto& reader : readers) {
    ASSERT_NO_FATAL_FAILURE(scene.ExpectSamePages(*reader));
  }
  EXPECT_TRUE(scene.batch().TakeProblem(scene.stream()).ok());
}

TEST_F(GpuSharedPrefixTest, GraphOfEitherFormIsRightForAnyMembers) {
  GpuScene scene(SharedOptions());
  const auto once = scene.Capture(4, /*reads_prefix_once=*/true);
  const auto plain = scene.Capture(4);
  const auto first = Readers(&scene, 1000);
  const auto second = Readers(&scene, 2000);
  const auto alone = Prefilled(&scene, {70, 250});
  const auto replay = [&](const std::vector<Member>& members, bool is_shared, int step) {
    StepGraph* const graph = step % 3 == 2 ? plain.get() : once.get();
    ASSERT_NO_FATAL_FAILURE(scene.Replay(members, graph));
    EXPECT_EQ(scene.batch().shares_prefix(), is_shared);
  };
  for (int i = 0; i < 70; ++i) {
    SCOPED_TRACE(testing::Message() << "step " << i);
    std::vector<Member> members = Decoding(i % 10 < 5 ? first : second);
    members.resize(1 + static_cast<size_t>(i % 3));
    ASSERT_NO_FATAL_FAILURE(replay(members, members.size() > 1, i));
    if (i % 7 == 0) {
      ASSERT_NO_FATAL_FAILURE(replay({{first[0].get(), 1}, {second[0].get(), 1}}, false, i));
      ASSERT_NO_FATAL_FAILURE(replay({{first[1].get(), 1}, {alone[1].get(), 1}}, false, i));
      ASSERT_NO_FATAL_FAILURE(replay(Decoding(alone), false, i));
    }
  }
  EXPECT_TRUE(scene.batch().TakeProblem(scene.stream()).ok());
}

}  // namespace
}  // namespace crumb
