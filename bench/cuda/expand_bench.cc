// SPDX-License-Identifier: Apache-2.0
//
// Expansion of INT2 head blocks to BF16 rows on one core, as stored and back in the model's space,
// in bytes of BF16 made a second, beside a copy of as many bytes between the same places. Blocks
// and rows are more than the processor's caches hold.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

#include "bench/support/figure.h"
#include "bench/support/thread_clock.h"
#include "crumb/cuda/expand.h"
#include "proto/page/page_format.h"

namespace crumb::bench {
namespace {

constexpr size_t kBlocks = 2048;  // 67 MB of BF16 at head_dim 128.
constexpr int kRounds = 7;

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void Measure(uint32_t dim, ExpandSpace space, CpuPath path) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 1 / std::sqrt(static_cast<float>(dim)));
  std::vector<float> rotation(size_t{dim} * dim);
  std::generate(rotation.begin(), rotation.end(), [&] { return normal(random); });
  const std::vector<float> mean(dim, 0.5f);
  const HeadParameters head{.key_dim = dim,
                            .value_dim = dim,
                            .key_rotation = rotation.data(),
                            .value_rotation = rotation.data(),
                            .key_mean = mean.data()};
  const Int2HeadBlock format{dim, dim};
  std::vector<std::byte> blocks(kBlocks * format.bytes(), std::byte{0x35});
  const size_t half = size_t{kPageTokens} * dim;
  std::vector<BFloat16> rows(kBlocks * 2 * half);
  const std::vector<BFloat16> others(rows.size());
  const double bytes = static_cast<double>(rows.size() * sizeof(BFloat16));
  std::vector<double> rates;
  std::vector<double> copies;
  for (int round = 0; round < kRounds; ++round) {
    double start = ThreadSeconds();
    std::memcpy(rows.data(), others.data(), rows.size() * sizeof(BFloat16));
    copies.push_back(bytes / (ThreadSeconds() - start) / 1e9);
    start = ThreadSeconds();
    for (size_t i = 0; i < kBlocks; ++i) {
      const std::span<BFloat16> out = std::span(rows).subspan(i * 2 * half, 2 * half);
      ExpandHeadBlock(head, std::span(blocks).subspan(i * format.bytes(), format.bytes()), space,
                      out.first(half), out.subspan(half), path);
    }
    rates.push_back(bytes / (ThreadSeconds() - start) / 1e9);
  }
  Register(absl::StrCat("expand/", space == ExpandSpace::kRotated ? "rotated" : "model", "/",
                        std::string(CpuPathName(path)).c_str(), "/d:", dim),
           {.value = Median(rates),
            .limit = Median(copies),
            .unit = "GB/s",
            .limit_name = "memcpy of as many bytes"});
}

}  // namespace
}  // namespace crumb::bench

int main(int argc, char** argv) {
  using crumb::CpuPath;
  using crumb::ExpandSpace;
  benchmark::Initialize(&argc, argv);
  for (const CpuPath path : {CpuPath::kAvx512, CpuPath::kAvx2}) {
    for (const ExpandSpace space : {ExpandSpace::kRotated, ExpandSpace::kModel}) {
      if (crumb::CpuPathAvailable(path)) {
        crumb::bench::Measure(128, space, path);
      }
    }
  }
  benchmark::RunSpecifiedBenchmarks();
}
