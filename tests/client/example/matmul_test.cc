// SPDX-License-Identifier: Apache-2.0
#include "client/example/matmul.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <random>
#include <tuple>
#include <vector>

#include "client/example/matmul_kernel.h"
#include "crumb/cuda/cpu_path.h"

namespace crumb::example {
namespace {

std::vector<float> Random(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) {
    value = normal(random);
  }
  return values;
}

// [num_tokens, rows, columns, threads]
class MatMulTest
    : public ::testing::TestWithParam<std::tuple<uint32_t, uint32_t, uint32_t, uint32_t>> {};

TEST_P(MatMulTest, IsTheProductByTheTranspose) {
  const auto [num_tokens, rows, columns, threads] = GetParam();
  const auto weights = Random(size_t{rows} * columns, 1);
  const auto in = Random(size_t{num_tokens} * columns, 2);
  std::vector<float> out(size_t{num_tokens} * rows, NAN);
  WorkerTeam team(threads);
  MatMul({weights.data(), rows, columns}, in.data(), num_tokens, out.data(), team);
  for (size_t token = 0; token < num_tokens; ++token) {
    for (size_t row = 0; row < rows; ++row) {
      double sum = 0;
      for (size_t i = 0; i < columns; ++i) {
        sum += double{in[token * columns + i]} * weights[row * columns + i];
      }
      // Sums of `columns` products of unit variance, in float.
      ASSERT_NEAR(out[token * rows + row], sum, 1e-4 * std::sqrt(columns))
          << "token " << token << ", row " << row;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes,
                         MatMulTest,
                         ::testing::Values(std::tuple(1, 1, 1, 1),
                                           std::tuple(1, 100, 64, 2),
                                           std::tuple(3, 49, 576, 2),
                                           std::tuple(64, 192, 96, 2),
                                           std::tuple(65, 97, 33, 3),
                                           std::tuple(2, 7, 5, 4)));

TEST(MatMulKernelTest, EveryInstructionSetAgrees) {
  if (!CpuPathAvailable(CpuPath::kAvx2)) {
    GTEST_SKIP() << "this processor has no AVX2";
  }
  const auto weights = Random(96 * 64, 3);
  const auto in = Random(10 * 64, 4);
  std::vector<float> portable(10 * 96);
  std::vector<float> avx2(10 * 96);
  MatMulPortable({weights.data(), 96, 64}, 0, 96, in.data(), 10, portable.data());
  MatMulAvx2({weights.data(), 96, 64}, 0, 96, in.data(), 10, avx2.data());
  for (size_t i = 0; i < portable.size(); ++i) {
    ASSERT_NEAR(portable[i], avx2[i], 1e-4);
  }
}

TEST(WorkerTeamTest, EveryWorkerWorksOnceARound) {
  WorkerTeam team(3);
  EXPECT_EQ(team.num_workers(), 3u);
  std::atomic<uint32_t> calls[3] = {};
  for (int round = 0; round < 1000; ++round) {
    team.Run([&](uint32_t worker) { ++calls[worker]; });
    for (const auto& count : calls) {
      ASSERT_EQ(count, static_cast<uint32_t>(round + 1));
    }
  }
}

}  // namespace
}  // namespace crumb::example
