// SPDX-License-Identifier: Apache-2.0
//
// Whole files, made by torch_fixtures.py, which says what each of them is.
#include "cuda/checkpoint/rotation_checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <string>

namespace crumb::checkpoint {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

absl::StatusOr<RotationCheckpoint> Load(const std::string& name) {
  return LoadRotationCheckpoint(std::string(CRUMB_TORCH_FIXTURES "/") + name + ".pt");
}

// What torch_fixtures.py puts there.
float Element(size_t dim, size_t layer, size_t head, size_t row, size_t column) {
  const size_t turned = (row + layer + 3 * head) % dim;
  const double size = 1 / std::sqrt(static_cast<double>(dim));
  return static_cast<float>(std::popcount(turned & column) % 2 == 0 ? size : -size);
}

void ExpectRotations(const RotationCheckpoint& checkpoint) {
  const size_t dim = checkpoint.dim;
  ASSERT_EQ(checkpoint.rotations.size(),
            checkpoint.layer_ids.size() * checkpoint.num_heads * dim * dim);
  for (size_t i = 0; i < checkpoint.rotations.size(); ++i) {
    const size_t block = i / (dim * dim);
    ASSERT_EQ(checkpoint.rotations[i],
              Element(dim, checkpoint.layer_ids[block / checkpoint.num_heads],
                      block % checkpoint.num_heads, i / dim % dim, i % dim))
        << i;
  }
}

TEST(RotationCheckpointTest, ReadsOneRotationALayer) {
  const auto checkpoint = Load("v1_values");
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->objective, "sst_r_h_pbr");
  EXPECT_FALSE(checkpoint->is_per_head);
  EXPECT_EQ(checkpoint->num_heads, 1U);
  EXPECT_EQ(checkpoint->dim, 64U);
  EXPECT_THAT(checkpoint->layer_ids, ElementsAre(3, 7));
  ExpectRotations(*checkpoint);
}

TEST(RotationCheckpointTest, ReadsOneRotationAKvHead) {
  const auto checkpoint = Load("v2_keys");
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_TRUE(checkpoint->is_per_head);
  EXPECT_EQ(checkpoint->num_heads, 2U);
  ExpectRotations(*checkpoint);
}

TEST(RotationCheckpointTest, LayersAreOrderedByTheirIds) {
  const auto checkpoint = Load("unsorted_layers");
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_THAT(checkpoint->layer_ids, ElementsAre(3, 7));
  ExpectRotations(*checkpoint);
}

TEST(RotationCheckpointTest, TransposedViewsAreReadAsTorchReadsThem) {
  const auto checkpoint = Load("view");
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  ExpectRotations(*checkpoint);
}

struct BadFile {
  const char* name;
  const char* error;
};

class BadRotationCheckpointTest : public testing::TestWithParam<BadFile> {};

TEST_P(BadRotationCheckpointTest, IsRefusedAndSaysWhy) {
  const auto checkpoint = Load(GetParam().name);
  ASSERT_FALSE(checkpoint.ok());
  EXPECT_EQ(checkpoint.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(
      std::string(checkpoint.status().message()),
      AllOf(HasSubstr(std::string(GetParam().name) + ".pt: "), HasSubstr(GetParam().error)));
}

const BadFile kBadFiles[] = {
    {"half_floats", "global 'torch HalfStorage' is refused"},
    {"view_beyond_storage", "layer 7: 'rotation': size [32, 32], stride [32, 1] from element 1"},
    {"view_beyond_all_memory", "leaves its storage of 1024 floats"},
    {"view_of_one_element", "'rotation' is [1048576, 1048576]"},
    {"negative_stride", "a tensor's stride is an integer, -32"},
    {"empty_tensor", "'rotation' is [0, 0]"},
    {"nan", "layer 7: 'rotation': element 0 of [32, 32] is NaN"},
    {"other_shape", "'rotation' is [64, 64], that of layer 3 [32, 32]"},
    {"not_square", "'rotation' is [16, 64]"},
    {"truncated_tensor", "entry 'archive/data/2', has 4092 bytes; the pickle says 1024 floats"},
    {"missing_storage", "entry 'archive/data/2', is missing"},
    {"version_three", "'format_version' is 3; 1 and 2 are known"},
    {"version_text", "'format_version' is text; an integer is expected"},
    {"other_grouping", "'source_grouping' is 'per_kv_head'; in version 1 it is 'layer'"},
    {"no_layers", "it has 0 layers; 1 to 512"},
    {"layers_list", "'layers' is a list"},
    {"negative_layer", "layer id -1"},
    {"other_layer_id", "layer 3: 'layer_id' is 4"},
    {"no_rotation", "layer 3: 'rotation' is missing; a tensor is expected"},
    {"odd_dim", "'rotation' is [8, 8]; [d, d] is expected, d a multiple of 32"},
    {"not_a_dict", "the file holds a list"},
    {"runs_code", "system' is refused"},
    {"instance", "global 'elsewhere Instance' is refused"},
    {"set", "set' is refused"},
    {"big_integer", "opcode LONG1 (0x8a) is refused"},
    {"protocol_four", "does not begin as protocol 2"},
    {"truncated_pickle", "it is truncated"},
    {"compressed", "entry 'archive/data.pkl' is compressed (method 8, deflate)"},
    {"bomb", "is compressed"},
    {"wrong_crc", "entry 'archive/data/2' of 4096 bytes: CRC error"},
    {"cut_short", "are no whole zip archive"},
    {"empty", "the file is empty"},
    {"overlapping", "are no whole zip archive"},
    {"two_pickles", "'other/data.pkl' are both there"},
    {"no_pickle", "none of the 1 entries is a data.pkl"},
    {"big_endian", "entry 'archive/byteorder' says 'big'"},
    {"old_version", "entry 'archive/version' says '1'"},
};

INSTANTIATE_TEST_SUITE_P(Each,
                         BadRotationCheckpointTest,
                         testing::ValuesIn(kBadFiles),
                         [](const auto& bad) { return std::string(bad.param.name); });

TEST(RotationCheckpointTest, AFileThatIsNotThereIsNotFound) {
  EXPECT_EQ(Load("nothing").status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace crumb::checkpoint
