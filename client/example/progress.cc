// SPDX-License-Identifier: Apache-2.0
#include "client/example/progress.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace crumb::example {

Progress::Progress(std::string label, uint64_t total, std::string unit)
    : label_(std::move(label)),
      total_(std::max<uint64_t>(total, 1)),
      unit_(std::move(unit)),
      shown_(isatty(STDERR_FILENO) == 1),
      start_(Clock::System().Now()) {}

Progress::~Progress() {
  if (shown_) {
    std::fputs("\r\033[K", stderr);
  }
}

void Progress::Add(uint64_t count) {
  done_ = std::min(total_, done_ + count);
  if (shown_) {
    const std::string line = Line(Clock::System().Now() - start_);
    std::fprintf(stderr, "\r\033[K%s", line.c_str());
  }
}

std::string Progress::Line(absl::Duration elapsed) const {
  constexpr size_t kBarWidth = 30;
  const double seconds = std::max(absl::ToDoubleSeconds(elapsed), 1e-3);
  const double rate = static_cast<double>(done_) / seconds;
  const size_t filled = kBarWidth * done_ / total_;
  std::string line =
      absl::StrFormat("%s  [%s%s]  %d/%d %s  %.0f/s", label_, std::string(filled, '#'),
                      std::string(kBarWidth - filled, '-'), done_, total_, unit_, rate);
  if (done_ > 0) {
    absl::StrAppendFormat(&line, "  %.0f s left", static_cast<double>(total_ - done_) / rate);
  }
  return line;
}

}  // namespace crumb::example
