// SPDX-License-Identifier: Apache-2.0
//
// The messages of the UCX data plane: a header, and after the length of a header of its operation
// the payload of entries.
#include <algorithm>
#include <variant>

#include "proto/wire/pull_message.h"
#include "tests/fuzz/fuzz_check.h"
#include "tests/fuzz/fuzz_subject.h"

namespace crumb {
namespace {

bool FuzzEntries(const PullMessage& pull, std::span<const std::byte> payload) {
  Require(pull.num_entries >= 1 && pull.num_entries <= kMaxPullEntries, "entries out of bounds");
  Require(pull.chunk_bytes >= 1 && pull.chunk_bytes <= kMaxChunkBytes, "chunk out of bounds");
  Require(pull.geometry.IsValid(), "geometry out of bounds");
  Require(pull.ordered_layers >= 1 && pull.ordered_layers <= pull.geometry.num_layers,
          "ordered layers out of bounds");
  const absl::StatusOr<std::vector<PullEntry>> entries = DecodeEntries(pull, payload);
  if (!entries.ok()) {
    CheckRefusal(entries.status());
    return false;
  }
  Require(entries->size() == pull.num_entries, "another number of entries");
  for (const PullEntry& entry : *entries) {
    Require(entry.generation % 2 == 0, "an odd generation");
  }
  return true;
}

template <typename Message>
FuzzSeed Seed(std::string name, const Message& message) {
  const auto bytes = WireBytes(message);
  return {std::move(name), {bytes.begin(), bytes.end()}};
}

template <typename Message>
Message MessageOf(PullOp op) {
  Message message;
  message.preamble.op = op;
  message.preamble.request_id = 7;
  return message;
}

}  // namespace

std::vector<FuzzSeed> FuzzSeeds() {
  auto pull = MessageOf<PullMessage>(PullOp::kPull);
  pull.lease_id = 1;
  pull.num_entries = 1;
  pull.chunk_bytes = 4096;
  pull.geometry = {.num_layers = 2, .num_kv_heads = 1, .key_dim = 64, .value_dim = 64};
  pull.ordered_layers = 1;
  FuzzSeed pull_seed = Seed("pull", pull);
  const PullEntry entry{.page_idx = 1, .generation = 2};
  const auto payload = WireBytes(entry);
  pull_seed.file.insert(pull_seed.file.end(), payload.begin(), payload.end());

  auto hello = MessageOf<HelloMessage>(PullOp::kHello);
  hello.session_id = 1;
  auto stage = MessageOf<StageMessage>(PullOp::kStage);
  stage.publish_id = 3;
  stage.request_bytes = 4096;
  auto chunk = MessageOf<ChunkMessage>(PullOp::kChunk);
  chunk.total_bytes = 4096;
  return {Seed("hello", hello),
          pull_seed,
          Seed("cancel", MessageOf<CancelMessage>(PullOp::kCancel)),
          Seed("stage", stage),
          Seed("chunk", chunk),
          Seed("end", MakeEnd(7, absl::NotFoundError("gone")))};
}

bool FuzzOne(std::span<const std::byte> input) {
  // A pull's payload travels beside its header; here it follows it.
  const size_t header_bytes = std::min(input.size(), sizeof(PullMessage));
  absl::StatusOr<DataPlaneMessage> message = DecodeMessage(input.first(header_bytes));
  if (message.ok() && std::holds_alternative<PullMessage>(*message)) {
    return FuzzEntries(std::get<PullMessage>(*message), input.subspan(header_bytes));
  }
  message = DecodeMessage(input);
  if (!message.ok()) {
    CheckRefusal(message.status());
    return false;
  }
  if (const auto* end = std::get_if<EndMessage>(&*message)) {
    static_cast<void>(EndStatus(*end).ToString());
  }
  return true;
}

}  // namespace crumb
