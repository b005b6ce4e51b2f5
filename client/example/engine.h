// SPDX-License-Identifier: Apache-2.0
//
// Answers prompts with a LlamaModel, and shares what prompts have in common through crumbd: looks
// the prompt up, adopts the prefix that was found, computes the rest, publishes what is worth it.
//
// The cache is an optimisation and never a dependency: without a daemon, or when it goes away in
// the middle, the engine computes what it would have read and says so in the answer.
//
// Thread-compatible: one prompt at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "client/example/llama_model.h"
#include "client/example/sampler.h"
#include "crumb/client.h"
#include "crumb/cuda/profile.h"
#include "crumb/sequence.h"

namespace crumb::example {

struct EngineOptions {
  std::shared_ptr<const Profile> profile = nullptr;  // shared: with the client and its sequences.
  uint32_t num_threads = 1;
  // Prompts are computed in chunks that end at multiples of this, so that equal prefixes are
  // computed alike.
  uint32_t chunk_tokens = 512;
  LookupOptions lookup = {};
  PublishOptions publish = {};
};

struct Request {
  std::vector<uint32_t> prompt = {};
  // The leading tokens that other prompts will have too: a system prompt. Their whole pages are
  // published, unless they came from the cache. A chunk ends there.
  uint32_t shared_tokens = 0;
  bool publish = false;
  uint32_t max_new_tokens = 64;
  uint32_t end_token = 0;  // Ends the answer; not part of it.
  SamplerOptions sampling = {};
};

struct Answer {
  std::vector<uint32_t> tokens;
  uint32_t prompt_tokens = 0;
  uint32_t reused_tokens = 0;   // Of the prompt, read from the cache.
  uint32_t trimmed_tokens = 0;  // Matched, but given up to keep the recent window in BF16.
  DataPlane data_plane = DataPlane::kAuto;  // By which they came; kAuto: none did.
  size_t copied_bytes = 0;
  absl::Duration time_to_first_token;  // From the prompt in hand, the lookup included.
  absl::Duration decode_time;          // Of the tokens after the first.
  Sequence::Footprint footprint;       // At the end.
  std::optional<PublishResult> published;
  // Why the cache was not used, or not to the end. OK without a cache, and for a plain miss.
  absl::Status cache_status;

  double DecodeTokensPerSecond() const;
};

class Engine {
 public:
  // `model` and `cache` (nullable: no cache) outlive the engine.
  Engine(LlamaModel& model, EngineOptions options, Client* cache);

  // INVALID_ARGUMENT: an empty prompt, one that leaves no room in the model's context, a token
  // beyond the vocabulary, sampling options out of range.
  absl::StatusOr<Answer> Generate(const Request& request);

 private:
  struct Run;

  absl::Status CheckRequest(const Request& request) const;
  void LookUp(Run& run);
  absl::Status StartSequence(Run& run);
  absl::Status Advance(Run& run);
  absl::Status Feed(Run& run);
  uint32_t ChunkEnd(const Run& run) const;
  void Publish(Run& run);

  LlamaModel& model_;
  const EngineOptions options_;
  Client* const cache_;
};

}  // namespace crumb::example
