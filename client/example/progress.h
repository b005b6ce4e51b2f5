// SPDX-License-Identifier: Apache-2.0
//
// One line on a terminal that says how far a long job is, how fast it goes and how long it will
// take. Silent where there is no terminal. Confined to one thread.
#pragma once

#include <cstdint>
#include <string>

#include "absl/time/time.h"

#include "proto/base/clock.h"

namespace crumb::example {

class Progress {
 public:
  // `unit` is what is counted: "tokens".
  Progress(std::string label, uint64_t total, std::string unit);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void Add(uint64_t count);

  // "collect  [#####-----]  2048/4096 tokens  512/s  4 s left"
  std::string Line(absl::Duration elapsed) const;

 private:
  const std::string label_;
  const uint64_t total_;
  const std::string unit_;
  const bool shown_;
  const absl::Time start_;
  uint64_t done_ = 0;
};

}  // namespace crumb::example
