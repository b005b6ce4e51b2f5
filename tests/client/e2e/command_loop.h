// SPDX-License-Identifier: Apache-2.0
//
// What engines that obey have in common (tests/client/e2e/engine_process.h): a line is a word, a
// seed and a number of tokens; the answer is a line.
#pragma once

#include <cstdint>
#include <cstdio>
#include <functional>
#include <iostream>
#include <map>
#include <sstream>
#include <string>

#include "absl/status/status.h"

namespace crumb {

inline void Say(const std::string& line) {
  std::puts(line.c_str());
  std::fflush(stdout);
}

// Of a line that begins with "loud", "begun" is said before the command runs.
//
// Answers with what it returns; nothing, if that is empty: then it has spoken for itself.
using Command = std::function<std::string(uint32_t seed, uint32_t num_tokens)>;

// Says "attached", or why not; then obeys until its input ends. The program's exit status.
inline int Obey(const absl::Status& attached, const std::map<std::string, Command>& commands) {
  if (!attached.ok()) {
    Say(attached.ToString());
    return 1;
  }
  Say("attached");
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string word;
    uint32_t seed = 0;
    uint32_t num_tokens = 0;
    words >> word;
    if (word == "loud") {
      words >> word;
      Say("begun");
    }
    words >> seed >> num_tokens;
    const auto command = commands.find(word);
    const std::string answer =
        command == commands.end() ? "unknown command " + word : command->second(seed, num_tokens);
    if (!answer.empty()) {
      Say(answer);
    }
  }
  return 0;
}

}  // namespace crumb
