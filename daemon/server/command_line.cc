// SPDX-License-Identifier: Apache-2.0
#include "daemon/server/command_line.h"

#include <filesystem>
#include <map>
#include <system_error>
#include <vector>

#include "absl/strings/str_cat.h"

#include "CLI/CLI.hpp"
#include "daemon/server/config_file.h"
#include "proto/base/arguments.h"
#include "proto/base/status_macros.h"
#include "proto/base/version.h"

namespace crumb {
namespace {

// "--store.capacity" of "--store.capcity=4GiB".
std::string UnknownFlag(const std::string& argument) {
  std::vector<std::string_view> known = {"config", "check-config", "print-config", "version",
                                         "help"};
  for (const ConfigKey& key : ConfigKeys()) {
    known.push_back(key.path);
  }
  const size_t start = std::min(argument.find_first_not_of('-'), argument.size());
  const std::string name = argument.substr(start, argument.find('=', start) - start);
  const std::string_view nearest = NearestName(name, known);
  return absl::StrCat("unknown argument ", argument,
                      nearest.empty()
                          ? "; `crumbd --help` lists all"
                          : absl::StrCat("; did you mean --", std::string(nearest), "?"));
}

absl::Status SetFromFlags(const std::map<std::string, std::string>& flags, Config& config) {
  for (const ConfigKey& key : ConfigKeys()) {
    const auto flag = flags.find(std::string(key.path));
    if (flag == flags.end()) {
      continue;
    }
    if (const absl::Status status = key.set(flag->second, config); !status.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("--", std::string(key.path), ": ", status.message()));
    }
  }
  return absl::OkStatus();
}

// One option a key; CLI11 keeps the texts in `flags`.
void AddKeys(CLI::App& app, std::map<std::string, std::string>& flags) {
  const Config defaults;
  for (const ConfigKey& key : ConfigKeys()) {
    const std::string path(key.path);
    app.add_option_function<std::string>(
           "--" + path, [path, &flags](const std::string& text) { flags[path] = text; },
           std::string(key.doc))
        ->type_name(std::string(key.value))
        ->default_str(key.get(defaults))
        ->group("[" + path.substr(0, path.find('.')) + "]");
  }
}

// Engines are told the memory socket's path, and have working directories of their own.
void MakeSocketPathAbsolute(Config& config) {
  std::error_code error;
  const std::filesystem::path path = std::filesystem::absolute(config.unix_socket, error);
  if (!config.unix_socket.empty() && !error) {
    config.unix_socket = path.lexically_normal().string();
  }
}

}  // namespace

absl::StatusOr<CommandLine> ParseCommandLine(int argc, const char* const* argv) {
  CLI::App app(
      "crumbd keeps the KV cache of shared prompt prefixes at two bits an element, and "
      "serves it to the inference engines of this node.");
  app.name("crumbd");
  std::string file;
  bool check = false;
  bool print = false;
  bool version = false;
  std::map<std::string, std::string> flags;
  app.add_option("--config", file,
                 absl::StrCat("Configuration file, TOML; without, ", kDefaultConfigFile,
                              " if it is there. Flags override it."))
      ->type_name("FILE");
  app.add_flag("--check-config", check, "Read the configuration, say whether it is right, leave.");
  app.add_flag("--print-config", print, "Print the configuration as a file, with all keys; leave.");
  app.add_flag("--version", version, "Print the version and leave.");
  AddKeys(app, flags);
  app.allow_extras();
  CRUMB_RETURN_IF_ERROR(CheckFlagsHaveValues(argc, argv));
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    return CommandLine{{}, app.help()};
  } catch (const CLI::ParseError& error) {
    return absl::InvalidArgumentError(error.what());
  }
  if (!app.remaining().empty()) {
    return absl::InvalidArgumentError(UnknownFlag(app.remaining().front()));
  }
  CommandLine line;
  if (version) {
    line.text = absl::StrCat("crumbd ", kCrumbVersion, "\n");
    return line;
  }
  if (file.empty() && std::filesystem::exists(kDefaultConfigFile)) {
    file = kDefaultConfigFile;
  }
  if (!file.empty()) {
    CRUMB_RETURN_IF_ERROR(LoadConfigFile(file, line.config));
  }
  CRUMB_RETURN_IF_ERROR(SetFromFlags(flags, line.config));
  MakeSocketPathAbsolute(line.config);
  CRUMB_RETURN_IF_ERROR(CheckConfig(line.config));
  if (print) {
    line.text = PrintConfig(line.config);
  } else if (check) {
    line.text = absl::StrCat("the configuration is right", file.empty() ? "" : ": ", file, "\n");
  }
  return line;
}

}  // namespace crumb
