// SPDX-License-Identifier: Apache-2.0
//
// crumbctl top.
#include <poll.h>
#include <termios.h>
#include <unistd.h>

#include <iostream>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

#include "daemon/ctl/commands.h"
#include "daemon/ctl/format.h"
#include "daemon/ctl/json_reply.h"
#include "nlohmann/json.hpp"
#include "proto/base/status_macros.h"

namespace crumb {
namespace {

// The keyboard of a terminal without line editing and echo, so that q is seen at once; as it was
// afterwards. Ctrl-C comes as a byte: the terminal is put right whichever way top ends.
class Keyboard {
 public:
  Keyboard() : is_terminal_(tcgetattr(STDIN_FILENO, &before_) == 0) {
    if (is_terminal_) {
      termios raw = before_;
      raw.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO | ISIG);
      tcsetattr(STDIN_FILENO, TCSANOW, &raw);
    }
  }
  ~Keyboard() {
    if (is_terminal_) {
      tcsetattr(STDIN_FILENO, TCSANOW, &before_);
    }
  }
  Keyboard(const Keyboard&) = delete;
  Keyboard& operator=(const Keyboard&) = delete;

  // Waits for `time`. Returns whether the user wants to leave.
  bool Wait(absl::Duration time) const {
    const absl::Time end = absl::Now() + time;
    while (true) {
      const absl::Duration left = end - absl::Now();
      if (left <= absl::ZeroDuration()) {
        return false;
      }
      pollfd input{STDIN_FILENO, POLLIN, 0};
      const auto wait_ms = static_cast<int>(absl::ToInt64Milliseconds(left)) + 1;
      char key = 0;
      if (poll(&input, is_terminal_ ? 1 : 0, wait_ms) == 1 &&
          (read(STDIN_FILENO, &key, 1) != 1 || key == 'q' || key == 'Q' || key == 3)) {
        return true;
      }
    }
  }

 private:
  termios before_{};
  const bool is_terminal_;
};

// What a second brought.
struct Rates {
  double lookups = 0;
  double lookup_tokens = 0;
  double published_pages = 0;
  double evicted_pages = 0;
  double pulled_bytes = 0;
  // Of the lookups of the interval.
  uint64_t tokens = 0;
  uint64_t hit_tokens = 0;
  uint64_t usable_tokens = 0;
};

Rates Between(const v1::Counters& before, const v1::Counters& now, double seconds) {
  const auto rate = [seconds](uint64_t a, uint64_t b) {
    return static_cast<double>(b - a) / seconds;
  };
  return {.lookups = rate(before.lookups(), now.lookups()),
          .lookup_tokens = rate(before.lookup_tokens(), now.lookup_tokens()),
          .published_pages = rate(before.published_pages(), now.published_pages()),
          .evicted_pages = rate(before.evicted_pages(), now.evicted_pages()),
          .pulled_bytes = rate(before.pulled_bytes(), now.pulled_bytes()),
          .tokens = now.lookup_tokens() - before.lookup_tokens(),
          .hit_tokens = now.hit_tokens() - before.hit_tokens(),
          .usable_tokens = now.usable_tokens() - before.usable_tokens()};
}

nlohmann::ordered_json SampleJson(const v1::GetStatusReply& status, const Rates& rates) {
  return {{"uptime_seconds", status.uptime_seconds()},
          {"lookups_per_second", rates.lookups},
          {"lookup_tokens_per_second", rates.lookup_tokens},
          {"interval_lookup_tokens", rates.tokens},
          {"interval_hit_tokens", rates.hit_tokens},
          {"interval_usable_tokens", rates.usable_tokens},
          {"published_pages_per_second", rates.published_pages},
          {"evicted_pages_per_second", rates.evicted_pages},
          {"pulled_bytes_per_second", rates.pulled_bytes},
          {"used_bytes", status.used_bytes()},
          {"capacity_bytes", status.capacity_bytes()},
          {"leases", status.leases()},
          {"sessions", status.sessions_size()},
          {"counters", ToJson(status.counters())}};
}

// For pipes and files: a line a sample, columns of fixed width.
std::string SampleLine(const v1::GetStatusReply& status, const Rates& rates) {
  const auto cell = [](const std::string& text) {
    return std::string(text.size() < 12 ? 12 - text.size() : 1, ' ') + text;
  };
  return absl::StrCat(cell(Rate(rates.lookups)), cell(Rate(rates.lookup_tokens)),
                      cell(Percent(rates.hit_tokens, rates.tokens)),
                      cell(Percent(rates.usable_tokens, rates.tokens)),
                      cell(Rate(rates.published_pages)), cell(Rate(rates.evicted_pages)),
                      cell(Bytes(status.used_bytes())), cell(Count(status.leases())),
                      cell(std::to_string(status.sessions_size())), "\n");
}
constexpr char kSampleTitle[] =
    "   LOOKUPS/s    TOKENS/s     MATCHED      USABLE PUBLISHED/s   EVICTED/s        USED"
    "      LEASES    SESSIONS\n";

// For a terminal: the whole screen.
absl::Status PrintScreen(AdminClient& daemon,
                         const v1::GetStatusReply& status,
                         const Rates& rates,
                         std::ostream& out) {
  out << "\033[H\033[2J";
  CRUMB_RETURN_IF_ERROR(RunStatus(daemon, false, out));
  out << "\nnow        " << Rate(rates.lookups) << " lookups/s of " << Rate(rates.lookup_tokens)
      << " tokens/s: " << Percent(rates.hit_tokens, rates.tokens) << " matched, "
      << Percent(rates.usable_tokens, rates.tokens) << " usable\n"
      << "           " << Rate(rates.published_pages) << " pages/s published, "
      << Rate(rates.evicted_pages) << " evicted, "
      << Bytes(static_cast<uint64_t>(rates.pulled_bytes)) << "/s pulled\n";
  out << "\n";
  TreeOptions tree;
  tree.max_nodes = 20;
  CRUMB_RETURN_IF_ERROR(RunTree(daemon, tree, false, out));
  out << "\n" << Count(status.leases()) << " leases; q leaves" << std::flush;
  return absl::OkStatus();
}

}  // namespace

absl::Status RunTop(AdminClient& daemon, const TopOptions& options, bool json, std::ostream& out) {
  const bool live = !json && &out == &std::cout && isatty(STDOUT_FILENO) == 1;
  const Keyboard keyboard;
  CRUMB_ASSIGN_OR_RETURN(v1::GetStatusReply before, daemon.GetStatus());
  if (!live && !json) {
    out << kSampleTitle;
  }
  for (uint32_t sample = 0; options.num_samples == 0 || sample < options.num_samples; ++sample) {
    if (keyboard.Wait(options.interval)) {
      break;
    }
    CRUMB_ASSIGN_OR_RETURN(v1::GetStatusReply now, daemon.GetStatus());
    if (now.epoch() != before.epoch()) {
      return absl::UnavailableError("the daemon was started anew meanwhile: run top again");
    }
    const Rates rates =
        Between(before.counters(), now.counters(), now.uptime_seconds() - before.uptime_seconds());
    if (json) {
      out << SampleJson(now, rates).dump() << std::endl;
    } else if (live) {
      CRUMB_RETURN_IF_ERROR(PrintScreen(daemon, now, rates, out));
    } else {
      out << SampleLine(now, rates) << std::flush;
    }
    before = std::move(now);
  }
  if (live) {
    out << "\n";
  }
  return absl::OkStatus();
}

}  // namespace crumb
