// SPDX-License-Identifier: Apache-2.0
#include "client/example/engine.h"

#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"

#include "proto/base/clock.h"
#include "proto/base/status_macros.h"
#include "proto/page/page_format.h"

namespace crumb::example {

// One request on its way through the engine.
struct Engine::Run {
  const Request& request;
  uint32_t shared_tokens = 0;                      // Whole pages of request.shared_tokens.
  std::vector<uint32_t> tokens;                    // Prompt and answer so far.
  std::shared_ptr<PrefixHandle> prefix = nullptr;  // shared: with the sequence that adopts it.
  std::unique_ptr<Sequence> sequence = nullptr;
  std::vector<float> logits;  // After the last of tokens, once they are fed.
  Answer answer = {};
};

double Answer::DecodeTokensPerSecond() const {
  return tokens.size() < 2 ? 0
                           : static_cast<double>(tokens.size() - 1) /
                                 std::max(absl::ToDoubleSeconds(decode_time), 1e-9);
}

Engine::Engine(LlamaModel& model, EngineOptions options, Client* cache)
    : model_(model), options_(std::move(options)), cache_(cache) {}

absl::StatusOr<Answer> Engine::Generate(const Request& request) {
  CRUMB_RETURN_IF_ERROR(CheckRequest(request));
  CRUMB_ASSIGN_OR_RETURN(Sampler sampler, Sampler::Create(request.sampling));
  Run run{.request = request,
          .shared_tokens = request.shared_tokens / kPageTokens * kPageTokens,
          .tokens = request.prompt,
          .logits = std::vector<float>(model_.config().vocabulary_size)};
  Answer& answer = run.answer;
  answer.prompt_tokens = static_cast<uint32_t>(request.prompt.size());

  const absl::Time start = Clock::System().Now();
  LookUp(run);
  CRUMB_RETURN_IF_ERROR(StartSequence(run));
  CRUMB_RETURN_IF_ERROR(Advance(run));
  uint32_t token = sampler.Sample(run.logits);
  const absl::Time first_token = Clock::System().Now();

  while (token != request.end_token) {
    answer.tokens.push_back(token);
    if (answer.tokens.size() == request.max_new_tokens) {
      break;
    }
    run.tokens.push_back(token);
    CRUMB_RETURN_IF_ERROR(Advance(run));
    token = sampler.Sample(run.logits);
  }
  answer.time_to_first_token = first_token - start;
  answer.decode_time = Clock::System().Now() - first_token;
  answer.footprint = run.sequence->footprint();
  if (run.prefix != nullptr) {
    answer.copied_bytes = run.prefix->copied_bytes();
  }
  Publish(run);
  return std::move(answer);
}

absl::Status Engine::CheckRequest(const Request& request) const {
  const size_t room = model_.config().context_length;
  if (request.prompt.empty() || request.max_new_tokens == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("a prompt of ", request.prompt.size(), " tokens and an answer of ",
                     request.max_new_tokens, ": both must have at least one"));
  }
  if (request.prompt.size() + request.max_new_tokens > room) {
    return absl::InvalidArgumentError(
        absl::StrCat("a prompt of ", request.prompt.size(), " tokens and an answer of up to ",
                     request.max_new_tokens, " do not fit the model's context of ", room));
  }
  return absl::OkStatus();
}

// A miss and a cache that cannot be reached end alike: with nothing to reuse.
void Engine::LookUp(Run& run) {
  if (cache_ == nullptr) {
    return;
  }
  auto prefix = cache_->Lookup(run.tokens, options_.lookup);
  if (!prefix.ok()) {
    run.answer.cache_status = prefix.status();
    return;
  }
  run.answer.trimmed_tokens = (*prefix)->trimmed_tokens();
  if ((*prefix)->usable_tokens() > 0) {
    run.prefix = *std::move(prefix);
  }
}

// An empty sequence, or one that starts with the prefix that was found.
absl::Status Engine::StartSequence(Run& run) {
  CRUMB_ASSIGN_OR_RETURN(run.sequence,
                         Sequence::Create({.profile = options_.profile,
                                           .num_query_heads = model_.config().num_heads,
                                           .max_tokens = model_.config().context_length,
                                           .num_threads = options_.num_threads}));
  run.answer.reused_tokens = 0;
  run.answer.data_plane = DataPlane::kAuto;
  if (run.prefix != nullptr) {
    CRUMB_RETURN_IF_ERROR(run.sequence->Adopt(run.prefix));
    run.answer.reused_tokens = run.prefix->usable_tokens();
    run.answer.data_plane = run.prefix->data_plane();
  }
  if (run.request.publish && run.sequence->length() < run.shared_tokens) {
    CRUMB_RETURN_IF_ERROR(run.sequence->RetainTail(run.shared_tokens));
  }
  return absl::OkStatus();
}

// Feeds what the sequence has not seen. Should the adopted prefix turn out to be lost (the daemon
// died, the lease ended, bytes arrived wrong), everything is computed here instead.
absl::Status Engine::Advance(Run& run) {
  absl::Status status = Feed(run);
  if (!status.ok() && run.prefix != nullptr) {
    run.answer.cache_status = std::move(status);
    run.prefix = nullptr;
    CRUMB_RETURN_IF_ERROR(StartSequence(run));
    status = Feed(run);
  }
  return status;
}

absl::Status Engine::Feed(Run& run) {
  while (run.sequence->length() < run.tokens.size()) {
    const uint32_t start = run.sequence->length();
    const uint32_t end = ChunkEnd(run);
    CRUMB_ASSIGN_OR_RETURN(
        const std::span<const float> hidden,
        model_.Forward(std::span(run.tokens).subspan(start, end - start), *run.sequence));
    if (end == run.tokens.size()) {
      model_.Logits(hidden.last(model_.config().embedding_dim), run.logits);
    }
  }
  return absl::OkStatus();
}

uint32_t Engine::ChunkEnd(const Run& run) const {
  const uint32_t start = run.sequence->length();
  uint32_t end = (start / options_.chunk_tokens + 1) * options_.chunk_tokens;
  if (start < run.shared_tokens) {
    end = std::min(end, run.shared_tokens);
  }
  return std::min(end, static_cast<uint32_t>(run.tokens.size()));
}

void Engine::Publish(Run& run) {
  if (cache_ == nullptr || !run.request.publish || run.answer.reused_tokens >= run.shared_tokens) {
    return;
  }
  auto result = cache_->Publish(*run.sequence, std::span(run.tokens).first(run.shared_tokens),
                                options_.publish);
  if (result.ok()) {
    run.answer.published = *result;
  } else {
    run.answer.cache_status = result.status();
  }
}

}  // namespace crumb::example
