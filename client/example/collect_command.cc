// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <iostream>
#include <memory>
#include <vector>

#include "client/example/commands.h"
#include "client/example/gguf_file.h"
#include "client/example/llama_model.h"
#include "client/example/model_profile.h"
#include "client/example/progress.h"
#include "client/example/token_file.h"
#include "crumb/cuda/statistics.h"
#include "proto/base/file.h"
#include "proto/base/status_macros.h"

namespace crumb::example {
namespace {

// Hands what attention sees to the collector, a layer of a whole text at a time.
class CollectingObserver : public AttentionObserver {
 public:
  explicit CollectingObserver(StatisticsCollector& collector) : collector_(collector) {}

  absl::Status Observe(uint32_t layer,
                       uint32_t /*first_position*/,
                       std::span<const float> queries,
                       std::span<const float> keys,
                       std::span<const float> values) override {
    return collector_.AddText(layer, queries, keys, values);
  }

 private:
  StatisticsCollector& collector_;
};

}  // namespace

absl::Status Collect(const CollectCommand& command) {
  CRUMB_ASSIGN_OR_RETURN(const auto file, GgufFile::Open(command.model.model));
  CRUMB_ASSIGN_OR_RETURN(const auto model, LlamaModel::Load(*file, command.model.num_threads));
  const LlamaConfig& config = model->config();
  CRUMB_ASSIGN_OR_RETURN(
      const TokenFile tokens,
      TokenFile::Read(command.tokens, command.text_tokens, config.vocabulary_size));
  CRUMB_ASSIGN_OR_RETURN(const std::string name, file->GetString("general.name"));
  CRUMB_ASSIGN_OR_RETURN(const auto plain, IdentityProfile(config.geometry()));
  CRUMB_ASSIGN_OR_RETURN(
      StatisticsCollector collector,
      StatisticsCollector::Create(
          {.model = name, .geometry = config.geometry(), .num_query_heads = config.num_heads}));
  CollectingObserver observer(collector);

  const uint32_t num_texts =
      command.max_texts == 0 ? tokens.num_texts() : std::min(command.max_texts, tokens.num_texts());
  Progress progress("collect", uint64_t{num_texts} * command.text_tokens, "tokens");
  for (uint32_t index = 0; index < num_texts; ++index) {
    CRUMB_ASSIGN_OR_RETURN(const std::unique_ptr<Sequence> sequence,
                           Sequence::Create({.profile = plain,
                                             .num_query_heads = config.num_heads,
                                             .num_threads = command.model.num_threads,
                                             .keep_all_bf16 = true}));
    // One chunk, so that the observer sees whole texts.
    CRUMB_RETURN_IF_ERROR(model->Forward(tokens.text(index), *sequence, &observer).status());
    progress.Add(command.text_tokens);
  }
  CRUMB_ASSIGN_OR_RETURN(const Statistics statistics, collector.Finish());
  CRUMB_ASSIGN_OR_RETURN(const std::vector<std::byte> bytes, Statistics::Serialize(statistics));
  CRUMB_RETURN_IF_ERROR(WriteFileAtomically(command.out, bytes));
  std::cout << "Statistics of " << num_texts << " texts of " << command.text_tokens
            << " tokens: " << command.out << std::endl;
  return absl::OkStatus();
}

}  // namespace crumb::example
