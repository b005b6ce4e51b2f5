// SPDX-License-Identifier: Apache-2.0
//
// Demotion of one head block on one core, from the engine's rows: rotation of K and V and their
// rounding to two bits, as the daemon does it, beside the multiply-add rate of a large
// single-precision matrix product. Counted are d^2 multiply-adds a row for rotation and d^2/2 a
// row of K and range for feedback (four ranges); finding ranges, rounding and packing come on top.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

#include "bench/support/figure.h"
#include "bench/support/matrix_product.h"
#include "bench/support/thread_clock.h"
#include "crumb/cuda/demote.h"
#include "crumb/cuda/rotate.h"
#include "proto/page/page_format.h"

namespace crumb::bench {
namespace {

constexpr int kRounds = 15;
constexpr double kSecondsOfRound = 0.01;

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// One head's parameters, plain rows and room for what becomes of them.
class HeadBlock {
 public:
  HeadBlock(uint32_t dim, CodecId codec) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    const auto draw = [&](size_t count, float deviation) {
      std::vector<float> values(count);
      std::generate(values.begin(), values.end(), [&] { return deviation * normal(random); });
      return values;
    };
    const size_t elements = size_t{dim} * dim;
    rotation_ = draw(elements, 1 / std::sqrt(static_cast<float>(dim)));
    feedback_ = draw(elements, 0.05f);
    for (size_t i = 0; i < dim; ++i) {
      std::fill_n(feedback_.begin() + static_cast<ptrdiff_t>(i * dim), i, 0.0f);
      feedback_[i * dim + i] = 1;
    }
    metric_.resize(elements);
    for (size_t i = 0; i < dim; ++i) {
      metric_[i * dim + i] = 1;
    }
    mean_ = draw(dim, 1);
    plain_ = draw(size_t{kPageTokens} * dim, 1);
    keys_.resize(plain_.size());
    values_.resize(plain_.size());
    block_.resize(Int2HeadBlock{dim, dim}.bytes());
    head_ = {.key_dim = dim,
             .value_dim = dim,
             .codec = codec,
             .key_rotation = rotation_.data(),
             .value_rotation = rotation_.data(),
             .key_mean = mean_.data(),
             .key_feedback = feedback_.data(),
             .key_metric = metric_.data(),
             .query_mean = mean_.data(),
             .key_clip = 0.96f,
             .value_clip = 0.92f,
             .values_by_deviation = codec == CodecId::kOscarInt2Lm};
  }
  HeadBlock(const HeadBlock&) = delete;
  HeadBlock& operator=(const HeadBlock&) = delete;

  void Rotate(CpuPath path) {
    RotateKeys(head_, plain_, keys_, path);
    RotateValues(head_, plain_, values_, path);
  }
  void Demote(CpuPath path) {
    if (!DemoteHeadBlock(head_, keys_, values_, block_, path).ok()) {
      std::abort();
    }
  }

  double rotation_multiply_adds() const {
    return 2.0 * kPageTokens * head_.key_dim * head_.key_dim;
  }
  // Those of feedback, and of the rows' product with the metric.
  double rounding_multiply_adds() const {
    const double square = static_cast<double>(kPageTokens) * head_.key_dim * head_.key_dim;
    switch (head_.codec) {
      case CodecId::kOscarInt2:
      case CodecId::kOscarInt2Lm:
        return 0;
      case CodecId::kOscarInt2Aware:
        return 4 * 0.5 * square;
      case CodecId::kOscarInt2Tilted:
        return (4 * 0.5 + 1) * square;
    }
    return 0;
  }

 private:
  std::vector<float> rotation_;
  std::vector<float> feedback_;
  std::vector<float> metric_;
  std::vector<float> mean_;
  std::vector<float> plain_;
  std::vector<BFloat16> keys_;
  std::vector<BFloat16> values_;
  std::vector<std::byte> block_;
  HeadParameters head_;
};

// Calls a second of this thread's time.
double CallRate(const std::function<void()>& call) {
  const double start = ThreadSeconds();
  double elapsed = 0;
  int calls = 0;
  while (elapsed < kSecondsOfRound) {
    call();
    ++calls;
    elapsed = ThreadSeconds() - start;
  }
  return calls / elapsed;
}

void Measure(MatrixProduct& product, uint32_t dim, CodecId codec, CpuPath path) {
  HeadBlock block(dim, codec);
  std::vector<double> limits;
  std::vector<double> whole;
  std::vector<double> rounding;
  block.Rotate(path);
  for (int round = 0; round < kRounds; ++round) {
    limits.push_back(product.MeasureRate());
    whole.push_back(CallRate([&] {
      block.Rotate(path);
      block.Demote(path);
    }));
    rounding.push_back(CallRate([&] { block.Demote(path); }));
  }
  const double limit = Median(limits) / 1e9;
  const double calls = Median(whole);
  const std::string name = absl::StrCat("demote/", std::string(CodecName(codec)), "/",
                                        std::string(CpuPathName(path)), "/d:", dim);
  const double counted = block.rotation_multiply_adds() + block.rounding_multiply_adds();
  Register(name + "/multiply_adds", {.value = calls * counted / 1e9,
                                     .limit = limit,
                                     .target = 0.5 * limit,
                                     .unit = "G multiply-adds/s",
                                     .limit_name = product.name()});
  // The limit, if all that is counted ran at the matrix product's rate.
  Register(name + "/rows", {.value = calls * kPageTokens,
                            .limit = limit * 1e9 / counted * kPageTokens,
                            .unit = "rows of K and V/s",
                            .limit_name = "the counted multiply-adds at the product's rate"});
  if (HasFeedback(codec)) {
    Register(name + "/rounding_alone",
             {.value = Median(rounding) * block.rounding_multiply_adds() / 1e9,
              .limit = limit,
              .unit = "G multiply-adds/s",
              .limit_name = product.name()});
  }
}

}  // namespace
}  // namespace crumb::bench

int main(int argc, char** argv) {
  using crumb::CodecId;
  using crumb::CpuPath;
  benchmark::Initialize(&argc, argv);
  crumb::bench::MatrixProduct product;
  for (const CpuPath path : {CpuPath::kAvx512, CpuPath::kAvx2}) {
    for (const uint32_t dim : {64u, 128u, 256u}) {
      for (const CodecId codec : crumb::kCodecs) {
        if (crumb::CpuPathAvailable(path)) {
          crumb::bench::Measure(product, dim, codec, path);
        }
      }
    }
  }
  benchmark::RunSpecifiedBenchmarks();
}
