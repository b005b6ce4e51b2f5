// SPDX-License-Identifier: Apache-2.0
//
// Collecting statistics of an 8B model's geometry, and fitting a profile to them. Rows are normal:
// how long it takes does not depend on what they are.
#include <benchmark/benchmark.h>

#include <cstdlib>
#include <ctime>
#include <random>
#include <vector>

#include "bench/support/figure.h"
#include "bench/support/matrix_product.h"
#include "bench/support/thread_clock.h"
#include "crumb/cuda/fit_profile.h"
#include "crumb/cuda/statistics.h"

namespace crumb::bench {
namespace {

constexpr Geometry kGeometry{.num_layers = 36, .num_kv_heads = 8, .key_dim = 128, .value_dim = 128};
constexpr uint32_t kQueryHeads = 32;
constexpr size_t kTokens = 1024;

std::vector<float> NormalRows(size_t num_heads, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> rows(kTokens * num_heads * kGeometry.key_dim);
  for (float& x : rows) {
    x = normal(random);
  }
  return rows;
}

// All threads' processor time.
double ProcessSeconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

// Multiply-adds a token and layer: the symmetric products of queries, keys and values (half of a
// square each; keys once, values thrice), the keys' energy, and every 16th query's scores over half
// of the text.
double CollectedMultiplyAdds() {
  const double square = double{kGeometry.key_dim} * kGeometry.key_dim;
  const double scores =
      double{kQueryHeads} / Statistics::kAttentionStride * kTokens * kGeometry.key_dim;
  return square / 2 * kQueryHeads + kGeometry.num_kv_heads * square * (0.5 + 1.5 + 1) + scores;
}

Statistics Collect(MatrixProduct& product) {
  const std::vector<float> queries = NormalRows(kQueryHeads, 1);
  const std::vector<float> keys = NormalRows(kGeometry.num_kv_heads, 2);
  const std::vector<float> values = NormalRows(kGeometry.num_kv_heads, 3);
  auto collector = StatisticsCollector::Create(
      {.model = "synthetic", .geometry = kGeometry, .num_query_heads = kQueryHeads});
  const double start = ThreadSeconds();
  for (uint32_t layer = 0; layer < kGeometry.num_layers; ++layer) {
    if (!collector->AddText(layer, queries, keys, values).ok()) {
      std::abort();
    }
  }
  const double seconds = ThreadSeconds() - start;
  const double layers = kGeometry.num_layers;
  Register("collect/8b", {.value = kTokens / seconds,
                          .limit = product.MeasureRate() / (layers * CollectedMultiplyAdds()),
                          .unit = "tokens/s",
                          .limit_name = "the counted multiply-adds at the product's rate"});
  return *collector->Finish();
}

void Fit(const Statistics& statistics) {
  const double start = ProcessSeconds();
  if (!FitProfile(statistics, {.num_threads = 2}).ok()) {
    std::abort();
  }
  Register("fit/8b", {.value = (ProcessSeconds() - start) / 2,
                      .target = 60,
                      .unit = "s of two cores",
                      .limit_name = "",
                      .better = Better::kLower});
}

}  // namespace
}  // namespace crumb::bench

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  crumb::bench::MatrixProduct product;
  crumb::bench::Fit(crumb::bench::Collect(product));
  benchmark::RunSpecifiedBenchmarks();
}
