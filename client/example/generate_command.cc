// SPDX-License-Identifier: Apache-2.0
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"

#include "client/example/commands.h"
#include "client/example/engine.h"
#include "client/example/gguf_file.h"
#include "client/example/model_profile.h"
#include "client/example/tokenizer.h"
#include "crumb/client.h"
#include "nlohmann/json.hpp"
#include "proto/base/file.h"
#include "proto/base/status_macros.h"

namespace crumb::example {
namespace {

constexpr absl::Duration kAttachTimeout = absl::Seconds(5);
constexpr size_t kMaxSystemPromptBytes = size_t{16} << 20;

// The prompt, and how much of it is the system message.
absl::StatusOr<Request> MakeRequest(const GenerateCommand& command, const Tokenizer& tokenizer) {
  Request request{.publish = command.publish,
                  .max_new_tokens = command.max_new_tokens,
                  .end_token = tokenizer.end_token(),
                  .sampling = {.temperature = static_cast<float>(command.temperature),
                               .top_p = static_cast<float>(command.top_p),
                               .seed = command.seed}};
  if (!command.system_file.empty()) {
    CRUMB_ASSIGN_OR_RETURN(const std::string text,
                           ReadText(command.system_file, kMaxSystemPromptBytes));
    CRUMB_ASSIGN_OR_RETURN(request.prompt, tokenizer.EncodeMessage({"system", text}));
    request.shared_tokens = static_cast<uint32_t>(request.prompt.size());
  }
  CRUMB_ASSIGN_OR_RETURN(const auto question, tokenizer.EncodeMessage({"user", command.prompt}));
  CRUMB_ASSIGN_OR_RETURN(const auto start, tokenizer.EncodeAnswerStart());
  request.prompt.insert(request.prompt.end(), question.begin(), question.end());
  request.prompt.insert(request.prompt.end(), start.begin(), start.end());
  return request;
}

absl::StatusOr<DataPlane> ParseDataPlane(const std::string& name) {
  if (name == "auto") {
    return DataPlane::kAuto;
  }
  if (name == "map") {
    return DataPlane::kMap;
  }
  if (name == "ucx") {
    return DataPlane::kUcx;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("data plane ", name, " is not one of auto, map, ucx, none"));
}

const char* DataPlaneName(const Answer& answer) {
  switch (answer.data_plane) {
    case DataPlane::kMap:
      return "map";
    case DataPlane::kUcx:
      return "ucx";
    case DataPlane::kAuto:
      break;
  }
  return "none";
}

// An attached client, or none if the user wants none. shared: the profile, with its sequences.
absl::StatusOr<std::unique_ptr<Client>> Connect(const GenerateCommand& command,
                                                std::shared_ptr<const Profile> profile) {
  if (command.data_plane == "none") {
    return nullptr;
  }
  CRUMB_ASSIGN_OR_RETURN(const DataPlane data_plane, ParseDataPlane(command.data_plane));
  ClientOptions options;
  options.address = command.address;
  options.client_name = "crumb-example";
  options.tenant = command.tenant;
  options.profile = std::move(profile);
  options.data_plane = data_plane;
  CRUMB_ASSIGN_OR_RETURN(std::unique_ptr<Client> client, Client::Create(std::move(options)));
  if (const absl::Status attached = client->WaitAttached(kAttachTimeout); !attached.ok()) {
    return absl::Status(attached.code(),
                        absl::StrCat(attached.message(),
                                     "; start crumbd, name another by --address, or do without by "
                                     "--data-plane none"));
  }
  return client;
}

nlohmann::json ToJson(const Answer& answer, const std::string& text) {
  const Sequence::Footprint& held = answer.footprint;
  nlohmann::json json = {
      {"answer", text},
      {"answer_tokens", answer.tokens},
      {"prompt_tokens", answer.prompt_tokens},
      {"reused_tokens", answer.reused_tokens},
      {"trimmed_tokens", answer.trimmed_tokens},
      {"data_plane", DataPlaneName(answer)},
      {"time_to_first_token_ms", absl::ToDoubleMilliseconds(answer.time_to_first_token)},
      {"decode_tokens_per_second", answer.DecodeTokensPerSecond()},
      {"copied_bytes", answer.copied_bytes},
      {"own_int2_bytes", held.own_int2_bytes},
      {"own_bf16_bytes", held.own_bf16_bytes},
      {"shared_int2_bytes", held.shared_int2_bytes},
      {"shared_bf16_bytes", held.shared_bf16_bytes},
      {"bf16_equivalent_bytes", held.bf16_equivalent_bytes},
      {"cache_status", answer.cache_status.ToString()}};
  if (answer.published.has_value()) {
    json["published"] = {{"pages_added", answer.published->pages_added},
                         {"pages_present", answer.published->pages_present},
                         {"tail_pages", answer.published->tail_pages},
                         {"bytes_sent", answer.published->bytes_sent}};
  }
  return json;
}

void PrintForPeople(const Answer& answer, const std::string& text) {
  std::cout << text << "\n\n"
            << absl::StrFormat(
                   "%d prompt tokens, %d reused (%s, %d bytes copied); first token after %.0f ms, "
                   "then %.1f tokens/s\n",
                   answer.prompt_tokens, answer.reused_tokens, DataPlaneName(answer),
                   answer.copied_bytes, absl::ToDoubleMilliseconds(answer.time_to_first_token),
                   answer.DecodeTokensPerSecond());
  if (!answer.cache_status.ok()) {
    std::cout << "without the cache: " << answer.cache_status << "\n";
  }
}

}  // namespace

absl::Status Generate(const GenerateCommand& command) {
  CRUMB_ASSIGN_OR_RETURN(const auto file, GgufFile::Open(command.model.model));
  CRUMB_ASSIGN_OR_RETURN(const auto model, LlamaModel::Load(*file, command.model.num_threads));
  CRUMB_ASSIGN_OR_RETURN(const auto tokenizer, Tokenizer::Create(*file));
  CRUMB_ASSIGN_OR_RETURN(const auto profile, Profile::Load(command.profile));
  CRUMB_RETURN_IF_ERROR(CheckProfileFits(*profile, model->config().geometry()));
  CRUMB_ASSIGN_OR_RETURN(const Request request, MakeRequest(command, *tokenizer));
  CRUMB_ASSIGN_OR_RETURN(const std::unique_ptr<Client> client, Connect(command, profile));

  Engine engine(*model, {.profile = profile, .num_threads = command.model.num_threads},
                client.get());
  CRUMB_ASSIGN_OR_RETURN(const Answer answer, engine.Generate(request));
  const std::string text = tokenizer->Decode(answer.tokens);
  if (command.json) {
    std::cout << ToJson(answer, text).dump(1, ' ', false, nlohmann::json::error_handler_t::replace)
              << std::endl;
  } else {
    PrintForPeople(answer, text);
  }
  return absl::OkStatus();
}

}  // namespace crumb::example
