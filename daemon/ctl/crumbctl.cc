// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>
#include <string>

#include "absl/strings/str_cat.h"

#include "CLI/CLI.hpp"
#include "daemon/ctl/commands.h"
#include "daemon/ctl/selection.h"
#include "proto/base/arguments.h"
#include "proto/base/service_address.h"
#include "proto/base/status_macros.h"
#include "proto/base/version.h"

namespace crumb {
namespace {

struct Arguments {
  std::string address = "unix:/run/crumb/crumbd.sock";
  double timeout_seconds = 5;
  bool json = false;
  bool version = false;
  std::string namespace_prefix;
  std::string tokens;
  std::string tokens_file;
  bool all = false;
  uint32_t max_nodes = 1000;
  double interval_seconds = 1;
  uint32_t num_samples = 0;
};

void AddNamespace(CLI::App& command, Arguments& arguments, const std::string& without) {
  command
      .add_option("-n,--namespace", arguments.namespace_prefix,
                  "First digits of the namespace's id, as `status` shows it; without, " + without)
      ->type_name("ID");
}

void AddTokens(CLI::App& command, Arguments& arguments) {
  auto* tokens = command.add_option("-t,--tokens", arguments.tokens,
                                    "Token ids, separated by commas or blanks");
  tokens->type_name("IDS");
  command
      .add_option("-f,--tokens-file", arguments.tokens_file,
                  "File of token ids, separated by commas or white space; - is standard input")
      ->type_name("FILE")
      ->excludes(tokens);
}

// `without_tokens`: what the command can do without, for the message.
absl::StatusOr<PrefixOptions> Prefix(const Arguments& arguments, absl::string_view without_tokens) {
  PrefixOptions options{arguments.namespace_prefix, {}};
  if (!arguments.tokens.empty()) {
    CRUMB_ASSIGN_OR_RETURN(options.tokens, ParseTokenText(arguments.tokens));
  } else if (!arguments.tokens_file.empty()) {
    CRUMB_ASSIGN_OR_RETURN(options.tokens, ReadTokenFile(arguments.tokens_file));
  } else if (!arguments.all) {
    return absl::InvalidArgumentError(
        absl::StrCat("no tokens are given: use --tokens or --tokens-file", without_tokens));
  }
  return options;
}

absl::Status RunCommand(const std::string& name, const Arguments& arguments, std::ostream& out) {
  CRUMB_RETURN_IF_ERROR(CheckServiceAddress(arguments.address));
  AdminClient daemon(arguments.address, absl::Seconds(arguments.timeout_seconds));
  if (name == "status") {
    return RunStatus(daemon, arguments.json, out);
  }
  if (name == "tree") {
    return RunTree(daemon, {arguments.namespace_prefix, arguments.max_nodes}, arguments.json, out);
  }
  if (name == "top") {
    return RunTop(daemon, {absl::Seconds(arguments.interval_seconds), arguments.num_samples},
                  arguments.json, out);
  }
  if (name == "probe") {
    CRUMB_ASSIGN_OR_RETURN(const PrefixOptions options, Prefix(arguments, ""));
    return RunProbe(daemon, options, arguments.json, out);
  }
  CRUMB_ASSIGN_OR_RETURN(const PrefixOptions options,
                         Prefix(arguments, ", or --all for the whole namespace"));
  return RunEvict(daemon, options, arguments.json, out);
}

void Declare(CLI::App& app, Arguments& arguments) {
  app.name("crumbctl");
  app.fallthrough();  // Common options may follow the command.
  app.require_subcommand(0, 1);
  app.add_option("-a,--address", arguments.address, "Where crumbd listens: unix:PATH or HOST:PORT")
      ->envname("CRUMB_ADDRESS")
      ->capture_default_str();
  app.add_option("--timeout", arguments.timeout_seconds, "Seconds to wait for each answer")
      ->check(CLI::Range(0.001, 86400.0))
      ->capture_default_str();
  app.add_flag("--json", arguments.json, "Print JSON, with the names of admin.proto");
  app.add_flag("--version", arguments.version, "Print the version and leave");

  app.add_subcommand("status", "Memory, pages, hit rates, sessions and namespaces");
  CLI::App* tree = app.add_subcommand("tree", "The shared prefixes: tokens, bytes, hits, leases");
  AddNamespace(*tree, arguments, "all");
  tree->add_option("--max-nodes", arguments.max_nodes, "Branches shown at most")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  CLI::App* probe = app.add_subcommand("probe", "How much of a prompt is held");
  AddNamespace(*probe, arguments, "the only one");
  AddTokens(*probe, arguments);
  CLI::App* evict = app.add_subcommand("evict", "Drop a prefix and all that extend it");
  AddNamespace(*evict, arguments, "the only one");
  AddTokens(*evict, arguments);
  evict->add_flag("--all", arguments.all, "The whole namespace, instead of tokens")
      ->excludes("--tokens", "--tokens-file");
  CLI::App* top = app.add_subcommand("top", "Rates and prefixes, live; q leaves");
  top->add_option("--interval", arguments.interval_seconds, "Seconds between samples")
      ->check(CLI::Range(0.05, 3600.0))
      ->capture_default_str();
  top->add_option("--samples", arguments.num_samples, "Leave after so many; 0: never")
      ->capture_default_str();
  for (CLI::App* command : app.get_subcommands({})) {
    command->footer("--address, --timeout and --json of `crumbctl --help` may follow too.");
  }
}

}  // namespace

int RunCrumbctl(int argc, const char* const* argv, std::ostream& out, std::ostream& err) {
  CLI::App app("crumbctl shows and steers a running crumbd.");
  Arguments arguments;
  Declare(app, arguments);
  if (const absl::Status status = CheckFlagsHaveValues(argc, argv); !status.ok()) {
    err << "crumbctl: " << status.message() << "\n";
    return 2;
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error, out, err) == 0 ? 0 : 2;
  }
  if (arguments.version) {
    out << "crumbctl " << kCrumbVersion << "\n";
    return 0;
  }
  if (app.get_subcommands().empty()) {
    err << app.help();
    return 2;
  }
  const absl::Status status = RunCommand(app.get_subcommands().front()->get_name(), arguments, out);
  if (!status.ok()) {
    err << "crumbctl: " << status.message() << "\n";
    return status.code() == absl::StatusCode::kInvalidArgument ? 2 : 1;
  }
  return 0;
}

}  // namespace crumb
