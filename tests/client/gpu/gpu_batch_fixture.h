// SPDX-License-Identifier: Apache-2.0
//
// Sequences on a GPU step by step beside the same on the CPU. Tests of it are built twice: for a
// GPU, and with the pretended one, whose ops are the readable twins.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "gtest/gtest.h"

#include "tests/client/gpu/gpu_scene.h"
#include "tests/cuda/gpu/gpu_fixture.h"

namespace crumb {

class GpuBatchTest : public GpuFixture<testing::Test> {
 protected:
  using Live = GpuScene::Live;
  using Member = GpuScene::Member;

  static constexpr Geometry kGeometry{2, 2, 64, 64};
  static constexpr Windows kWindows{.sink_tokens = 64, .recent_tokens = 128};

  // Of results that are rounded to bf16 twice, once before they are rotated back.
  static GpuSceneOptions Options() { return {.profile = MakeExactProfile(kGeometry, kWindows)}; }
  // Of results in f32, as attention gives them: what is left is attention's own arithmetic.
  static GpuSceneOptions FloatOptions() {
    GpuSceneOptions options = Options();
    options.keeps_outputs_rotated = true;
    options.out_type = ElementType::kFloat32;
    options.tolerance = 0.004;
    return options;
  }
  // Sequences that have been prefilled to these lengths.
  static std::vector<std::unique_ptr<Live>> Prefilled(GpuScene* scene,
                                                      const std::vector<uint32_t>& lengths) {
    std::vector<std::unique_ptr<Live>> lives;
    for (const uint32_t length : lengths) {
      lives.push_back(scene->NewLive(static_cast<uint32_t>(100 + lives.size())));
      scene->Step(lives.back().get(), length);
    }
    return lives;
  }
  static std::vector<Member> Decoding(const std::vector<std::unique_ptr<Live>>& lives) {
    std::vector<Member> members;
    for (const auto& live : lives) {
      members.push_back({live.get(), 1});
    }
    return members;
  }
};

}  // namespace crumb
