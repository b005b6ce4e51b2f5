// SPDX-License-Identifier: Apache-2.0
//
// A figure: a measured value beside the limit it is held against. Every benchmark under bench/
// states its result as one, so that `make bench` can print all of them in one table, in one unit
// each, and say how close each comes. bench/README.md tells what is made of it.
//
// The limit is what the same machine can do at best at the same work (a memory copy, a matrix
// product, ucx_perftest), or a rival's figure. Measure both in the same run and in turns where you
// can: a neighbour's load then hits both.
//
// Use, in a Google Benchmark function, after the loop:
//   Report(state, {.value = gigabytes / seconds, .limit = copy_rate, .target = 0.95 * copy_rate,
//                  .unit = "GB/s", .limit_name = "memcpy of the same bytes"});
// or, in a program that measures several things in turns by itself, one Register() a figure before
// benchmark::RunSpecifiedBenchmarks().
#pragma once

#include <benchmark/benchmark.h>

#include <string>

namespace crumb::bench {

enum class Better { kHigher, kLower };

struct Figure {
  double value = 0;        // In `unit`: a median or p50 unless the benchmark's name says otherwise.
  double limit = 0;        // In `unit`; 0: none known.
  double target = 0;       // In `unit`: what must be reached; 0: nothing is promised.
  std::string unit;        // "GB/s", "us", "tokens/s", "bytes/page", ...
  std::string limit_name;  // What the limit is, for people; no semicolon.
  Better better = Better::kHigher;
};

// States the figure of the benchmark that `state` belongs to, instead of the time of an iteration.
inline void Report(benchmark::State& state, const Figure& figure) {
  state.counters["value"] = figure.value;
  if (figure.limit != 0) {
    state.counters["limit"] = figure.limit;
  }
  if (figure.target != 0) {
    state.counters["target"] = figure.target;
  }
  state.SetLabel("unit=" + figure.unit +
                 ";better=" + (figure.better == Better::kHigher ? "higher" : "lower") +
                 ";limit=" + figure.limit_name);
}

// Adds a benchmark that does nothing but state, once, a figure measured before.
inline void Register(const std::string& name, const Figure& figure) {
  benchmark::RegisterBenchmark(name.c_str(),
                               [figure](benchmark::State& state) {
                                 for (auto _ : state) {
                                 }
                                 Report(state, figure);
                               })
      ->Iterations(1)
      ->Repetitions(1);
}

}  // namespace crumb::bench
