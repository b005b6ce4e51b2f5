// SPDX-License-Identifier: Apache-2.0
//
// What crumb-example can do, one function a subcommand. Results go to stdout, progress and errors
// to stderr.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace crumb::example {

struct ModelOptions {
  std::string model;  // A GGUF file.
  uint32_t num_threads = 2;
};

struct GenerateCommand {
  ModelOptions model;
  std::string profile;
  std::string prompt;
  std::string system_file;  // Empty: no system prompt.
  std::string address = "unix:/run/crumb/crumbd.sock";
  std::string data_plane = "auto";  // auto, map, ucx; none: without a daemon.
  std::string tenant = "default";
  bool publish = false;
  uint32_t max_new_tokens = 64;
  double temperature = 0;
  double top_p = 1;
  uint64_t seed = 0;
  bool json = false;
};
absl::Status Generate(const GenerateCommand& command);

struct CollectCommand {
  ModelOptions model;
  std::string tokens;  // As TokenFile.
  std::string out;
  uint32_t text_tokens = 4096;
  uint32_t max_texts = 0;  // 0: all.
};
absl::Status Collect(const CollectCommand& command);

struct PerplexityCommand {
  ModelOptions model;
  std::string profile;  // Empty: everything in BF16.
  std::string tokens;
  uint32_t text_tokens = 4096;
  std::vector<uint32_t> texts;  // Indices; empty: all.
  uint32_t chunk_tokens = 64;
  uint32_t scored_from = 1024;
};
absl::Status MeasurePerplexity(const PerplexityCommand& command);

}  // namespace crumb::example
