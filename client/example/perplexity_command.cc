// SPDX-License-Identifier: Apache-2.0
#include <iostream>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

#include "client/example/commands.h"
#include "client/example/gguf_file.h"
#include "client/example/llama_model.h"
#include "client/example/model_profile.h"
#include "client/example/perplexity.h"
#include "client/example/progress.h"
#include "client/example/token_file.h"
#include "nlohmann/json.hpp"
#include "proto/base/clock.h"
#include "proto/base/status_macros.h"

namespace crumb::example {
namespace {

absl::StatusOr<PerplexityOptions> OptionsOf(const PerplexityCommand& command,
                                            const Geometry& geometry) {
  PerplexityOptions options;
  options.num_threads = command.model.num_threads;
  options.chunk_tokens = command.chunk_tokens;
  options.scored_from = command.scored_from;
  options.keep_all_bf16 = command.profile.empty();
  if (options.keep_all_bf16) {
    CRUMB_ASSIGN_OR_RETURN(options.profile, IdentityProfile(geometry));
  } else {
    CRUMB_ASSIGN_OR_RETURN(options.profile, Profile::Load(command.profile));
    CRUMB_RETURN_IF_ERROR(CheckProfileFits(*options.profile, geometry));
  }
  return options;
}

absl::StatusOr<std::vector<uint32_t>> TextIndices(const PerplexityCommand& command,
                                                  const TokenFile& tokens) {
  std::vector<uint32_t> indices = command.texts;
  if (indices.empty()) {
    indices.resize(tokens.num_texts());
    std::iota(indices.begin(), indices.end(), 0u);
  }
  for (const uint32_t index : indices) {
    if (index >= tokens.num_texts()) {
      return absl::InvalidArgumentError(absl::StrCat("text ", index, " is not in ", command.tokens,
                                                     ", which has texts 0 to ",
                                                     tokens.num_texts() - 1));
    }
  }
  return indices;
}

}  // namespace

absl::Status MeasurePerplexity(const PerplexityCommand& command) {
  CRUMB_ASSIGN_OR_RETURN(const auto file, GgufFile::Open(command.model.model));
  CRUMB_ASSIGN_OR_RETURN(const auto model, LlamaModel::Load(*file, command.model.num_threads));
  CRUMB_ASSIGN_OR_RETURN(const PerplexityOptions options,
                         OptionsOf(command, model->config().geometry()));
  CRUMB_ASSIGN_OR_RETURN(
      const TokenFile tokens,
      TokenFile::Read(command.tokens, command.text_tokens, model->config().vocabulary_size));
  CRUMB_ASSIGN_OR_RETURN(const std::vector<uint32_t> indices, TextIndices(command, tokens));

  const absl::Time start = Clock::System().Now();
  Progress progress("perplexity", uint64_t{indices.size()} * command.text_tokens, "tokens");
  Likelihood all;
  nlohmann::json texts = nlohmann::json::array();
  for (const uint32_t index : indices) {
    CRUMB_ASSIGN_OR_RETURN(const Likelihood text,
                           ScoreText(*model, tokens.text(index), options,
                                     [&](uint32_t count) { progress.Add(count); }));
    all.Add(text);
    texts.push_back({{"text", index}, {"perplexity", text.Perplexity()}});
  }
  const nlohmann::json result = {
      {"codec", options.keep_all_bf16 ? "bf16" : std::string(CodecName(options.profile->codec()))},
      {"profile_id", options.keep_all_bf16 ? "" : options.profile->id().Hex()},
      {"perplexity", all.Perplexity()},
      {"num_predictions", all.num_predictions},
      {"chunk_tokens", command.chunk_tokens},
      {"scored_from", command.scored_from},
      {"seconds", absl::ToDoubleSeconds(Clock::System().Now() - start)},
      {"texts", texts}};
  std::cout << result.dump(1) << std::endl;
  return absl::OkStatus();
}

}  // namespace crumb::example
