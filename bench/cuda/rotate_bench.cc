// SPDX-License-Identifier: Apache-2.0
//
// Rotation on one core beside the machine's single-precision matrix product (Eigen, 768^3, one
// thread): multiply-adds/s of both, measured in turn in one run, and their ratio. Prints one line a
// case and the same as JSON with --json.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"

#include "crumb/cuda/rotate.h"

#include <Eigen/Dense>

namespace {

using crumb::BFloat16;
using crumb::CpuPath;

constexpr int kRounds = 15;

struct Case {
  std::string name;
  double multiply_adds = 0;  // A call.
  std::function<void()> call;
  std::vector<double> rates = {};  // Multiply-adds/s, one a round.
};

// Calls for about 5 ms: long against the clock, short against the neighbours' bursts.
double MeasureRate(const Case& measured) {
  using Clock = std::chrono::steady_clock;
  size_t calls = 0;
  const auto start = Clock::now();
  std::chrono::duration<double> elapsed{};
  do {
    measured.call();
    ++calls;
    elapsed = Clock::now() - start;
  } while (elapsed.count() < 0.005);
  return static_cast<double>(calls) * measured.multiply_adds / elapsed.count();
}

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

struct Buffers {
  explicit Buffers(uint32_t dim)
      : matrix(size_t{dim} * dim),
        mean(dim),
        rows(size_t{64} * dim),
        out(rows.size()),
        narrow(rows.size()) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (auto* values : {&matrix, &mean, &rows}) {
      std::generate(values->begin(), values->end(), [&] { return normal(random); });
    }
    head = {.key_dim = dim,
            .value_dim = dim,
            .key_rotation = matrix.data(),
            .value_rotation = matrix.data(),
            .key_mean = mean.data()};
  }
  std::vector<float> matrix;
  std::vector<float> mean;
  std::vector<float> rows;
  std::vector<float> out;
  std::vector<BFloat16> narrow;
  crumb::HeadParameters head;
};

void AddCases(Buffers* buffers, CpuPath path, std::vector<Case>* cases) {
  const uint32_t dim = buffers->head.key_dim;
  for (const size_t num_rows : {size_t{1}, size_t{4}, size_t{64}}) {
    const std::string suffix =
        absl::StrFormat(" %s d=%d rows=%d", std::string(crumb::CpuPathName(path)), dim, num_rows);
    const size_t size = num_rows * dim;
    const double multiply_adds = static_cast<double>(size) * dim;
    cases->push_back({"keys to bf16" + suffix, multiply_adds, [=] {
                        crumb::RotateKeys(buffers->head, std::span(buffers->rows).first(size),
                                          std::span(buffers->narrow).first(size), path);
                      }});
    cases->push_back({"outputs back" + suffix, multiply_adds, [=] {
                        crumb::UnrotateOutputs(buffers->head, std::span(buffers->rows).first(size),
                                               std::span(buffers->out).first(size), path);
                      }});
  }
}

}  // namespace

int main(int argc, char** argv) {
  const bool json = argc > 1 && std::strcmp(argv[1], "--json") == 0;
  constexpr int kSide = 768;
  const Eigen::MatrixXf a = Eigen::MatrixXf::Random(kSide, kSide);
  const Eigen::MatrixXf b = Eigen::MatrixXf::Random(kSide, kSide);
  Eigen::MatrixXf c(kSide, kSide);
  Case yardstick{"sgemm", double{kSide} * kSide * kSide, [&] { c.noalias() = a * b; }};

  std::vector<Buffers> buffers;
  for (const uint32_t dim : {64U, 128U, 256U}) {
    buffers.emplace_back(dim);
  }
  std::vector<Case> cases;
  for (Buffers& of_dim : buffers) {
    of_dim.head.key_rotation = of_dim.head.value_rotation = of_dim.matrix.data();
    of_dim.head.key_mean = of_dim.mean.data();
    for (const CpuPath path : {CpuPath::kPortable, CpuPath::kAvx2, CpuPath::kAvx512}) {
      if (crumb::CpuPathAvailable(path)) {
        AddCases(&of_dim, path, &cases);
      }
    }
  }
  for (int round = 0; round < kRounds; ++round) {
    yardstick.rates.push_back(MeasureRate(yardstick));
    for (Case& measured : cases) {
      measured.rates.push_back(MeasureRate(measured));
    }
  }
  const double limit = Median(yardstick.rates);
  std::printf(json ? "[" : "sgemm %d^3, one thread: %.1f G multiply-adds/s\n", kSide, limit / 1e9);
  for (size_t i = 0; i < cases.size(); ++i) {
    const double rate = Median(cases[i].rates);
    if (json) {
      std::printf(
          "%s{\"name\": \"rotate: %s\", \"value\": %.4g, \"unit\": \"multiply-adds/s\", "
          "\"limit\": %.4g}",
          i == 0 ? "" : ",\n ", cases[i].name.c_str(), rate, limit);
    } else {
      std::printf("%-44s %6.1f G multiply-adds/s  %3.0f %% of sgemm\n", cases[i].name.c_str(),
                  rate / 1e9, 100 * rate / limit);
    }
  }
  std::printf(json ? "]\n" : "");
}
