// SPDX-License-Identifier: Apache-2.0
//
// crumb-example: a small CPU engine that keeps its KV cache in Crumb. Exit status: 0, 1 if the
// command failed, 2 for wrong arguments.
#include <cstdio>
#include <string>

#include "client/example/commands.h"
#include "proto/base/arguments.h"

#include <CLI/CLI.hpp>

namespace crumb::example {
namespace {

void AddModelOptions(CLI::App& app, ModelOptions& options) {
  app.add_option("--model", options.model, "GGUF file of a Llama-architecture model")->required();
  app.add_option("--threads", options.num_threads, "Threads to compute with")
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
}

void AddTextOptions(CLI::App& app, std::string& tokens, uint32_t& text_tokens) {
  app.add_option("--tokens", tokens, "Texts as raw little-endian u32 token ids")->required();
  app.add_option("--text-tokens", text_tokens, "Tokens a text")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
}

void AddGenerate(CLI::App& app, GenerateCommand& command) {
  AddModelOptions(app, command.model);
  app.add_option("--profile", command.profile, "The model's profile")->required();
  app.add_option("--prompt", command.prompt, "What the user says")->required();
  app.add_option("--system-file", command.system_file, "File with the system prompt");
  app.add_option("--address", command.address, "crumbd: unix:PATH or HOST:PORT")
      ->capture_default_str();
  app.add_option("--data-plane", command.data_plane,
                 "How pages come here: auto, map, ucx; none to work without crumbd")
      ->check(CLI::IsMember({"auto", "map", "ucx", "none"}))
      ->capture_default_str();
  app.add_option("--tenant", command.tenant, "Whose prefixes are shared")->capture_default_str();
  app.add_flag("--publish", command.publish, "Publish the system prompt's pages");
  app.add_option("--max-new-tokens", command.max_new_tokens, "Longest answer")
      ->capture_default_str();
  app.add_option("--temperature", command.temperature, "0: always the most likely token")
      ->capture_default_str();
  app.add_option("--top-p", command.top_p, "Sample from this much probability")
      ->capture_default_str();
  app.add_option("--seed", command.seed, "Of the sampler")->capture_default_str();
  app.add_flag("--json", command.json, "Print one JSON object");
}

void AddCollect(CLI::App& app, CollectCommand& command) {
  AddModelOptions(app, command.model);
  AddTextOptions(app, command.tokens, command.text_tokens);
  app.add_option("--texts", command.max_texts, "Use the first so many texts; 0: all")
      ->capture_default_str();
  app.add_option("--out", command.out, "Statistics file to write")->required();
}

void AddPerplexity(CLI::App& app, PerplexityCommand& command) {
  AddModelOptions(app, command.model);
  AddTextOptions(app, command.tokens, command.text_tokens);
  app.add_option("--profile", command.profile, "The cache's codec; without: everything in BF16");
  app.add_option("--texts", command.texts, "Indices of the texts to use; without: all")
      ->delimiter(',');
  app.add_option("--chunk-tokens", command.chunk_tokens, "Tokens computed at a time")
      ->check(CLI::Range(1, 1 << 16))
      ->capture_default_str();
  app.add_option("--scored-from", command.scored_from, "First position that counts")
      ->capture_default_str();
}

int Main(int argc, char** argv) {
  CLI::App app("A small CPU engine that keeps its KV cache in Crumb", "crumb-example");
  app.require_subcommand(0, 1);
  GenerateCommand generate;
  CollectCommand collect;
  PerplexityCommand perplexity;
  CLI::App* const generate_app = app.add_subcommand("generate", "Answer a prompt");
  AddGenerate(*generate_app, generate);
  CLI::App* const collect_app =
      app.add_subcommand("collect", "Collect the statistics that a profile is fitted from");
  AddCollect(*collect_app, collect);
  CLI::App* const perplexity_app =
      app.add_subcommand("perplexity", "Measure what a codec costs in quality");
  AddPerplexity(*perplexity_app, perplexity);
  if (const absl::Status status = CheckFlagsHaveValues(argc, argv); !status.ok()) {
    std::fprintf(stderr, "error: %s\n", status.ToString().c_str());
    return 2;
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  if (app.get_subcommands().empty()) {
    std::fputs(app.help().c_str(), stderr);
    return 2;
  }

  const absl::Status status = *generate_app  ? Generate(generate)
                              : *collect_app ? Collect(collect)
                                             : MeasurePerplexity(perplexity);
  if (!status.ok()) {
    std::fprintf(stderr, "error: %s\n", status.ToString().c_str());
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace crumb::example

int main(int argc, char** argv) {
  return crumb::example::Main(argc, argv);
}
