// SPDX-License-Identifier: Apache-2.0
//
// Expected values that other implementations made (make_expected*.py), and the model they are of.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "nlohmann/json.hpp"

namespace crumb::example {

inline nlohmann::json ReadExpected(const std::string& name) {
  std::ifstream file(std::filesystem::path(CRUMB_SOURCE_DIR) / "tests/client/example/data" / name);
  return nlohmann::json::parse(file);
}

// Where deploy/fetch-model.sh leaves the model; it may not be there.
inline std::filesystem::path ModelPath() {
  const char* path = std::getenv("CRUMB_MODEL");  // NOLINT(concurrency-mt-unsafe): no one sets it.
  return path != nullptr ? path
                         : std::filesystem::path(CRUMB_SOURCE_DIR) /
                               "build/models/SmolLM2-135M-Instruct.Q4_1.gguf";
}

}  // namespace crumb::example
