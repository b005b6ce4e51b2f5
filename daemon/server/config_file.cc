// SPDX-License-Identifier: Apache-2.0
#include "daemon/server/config_file.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

#include "proto/base/file.h"
#include "proto/base/status_macros.h"
#include "toml++/toml.h"

namespace crumb {
namespace {

absl::Status At(const std::string& file,
                const toml::source_region& where,
                const std::string& message) {
  return absl::InvalidArgumentError(absl::StrCat(file, ", line ", where.begin.line, ": ", message));
}

// The value as text for ConfigKey::set. INVALID_ARGUMENT: of another type than the key's.
absl::StatusOr<std::string> ValueText(const ConfigKey& key, const toml::node& node) {
  const std::string name(key.path);
  switch (key.kind) {
    case ConfigKind::kText:
      if (const auto* text = node.as_string()) {
        return text->get();
      }
      return absl::InvalidArgumentError(absl::StrCat(name, " must be a string, in quotes"));
    case ConfigKind::kSize:
      if (const auto* text = node.as_string()) {
        return text->get();
      }
      [[fallthrough]];
    case ConfigKind::kNumber:
      if (const auto* number = node.as_integer()) {
        return std::to_string(number->get());
      }
      return absl::InvalidArgumentError(
          absl::StrCat(name, key.kind == ConfigKind::kSize
                                 ? " must be a size, as in \"4GiB\", or a number of bytes"
                                 : " must be a whole number"));
    case ConfigKind::kFlag:
      if (const auto* flag = node.as_boolean()) {
        return std::string(flag->get() ? "true" : "false");
      }
      return absl::InvalidArgumentError(absl::StrCat(name, " must be true or false"));
  }
  return absl::InternalError(absl::StrCat("key ", name, " has no kind"));
}

absl::Status CheckSection(const std::string& section) {
  std::vector<std::string_view> sections;
  for (const ConfigKey& key : ConfigKeys()) {
    sections.push_back(key.path.substr(0, key.path.find('.')));
    if (sections.back() == section) {
      return absl::OkStatus();
    }
  }
  const std::string_view nearest = NearestName(section, sections);
  return absl::InvalidArgumentError(
      absl::StrCat("unknown section [", section, "]",
                   nearest.empty() ? "; `crumbd --print-config` lists all"
                                   : absl::StrCat("; did you mean [", std::string(nearest), "]?")));
}

absl::Status SetFromNode(const std::string& path, const toml::node& node, Config& config) {
  CRUMB_ASSIGN_OR_RETURN(const ConfigKey* const key, FindConfigKey(path));
  CRUMB_ASSIGN_OR_RETURN(const std::string text, ValueText(*key, node));
  if (const absl::Status status = key->set(text, config); !status.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", status.message()));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status LoadConfigText(const std::string& text, const std::string& name, Config& config) {
  toml::table parsed;
  try {
    parsed = toml::parse(std::string_view(text), std::string_view(name));
  } catch (const toml::parse_error& error) {
    return At(name, error.source(), std::string(error.description()));
  }
  for (const auto& [section_key, section_node] : parsed) {
    const std::string section(section_key.str());
    const toml::table* const table = section_node.as_table();
    if (table == nullptr) {
      return At(name, section_node.source(),
                absl::StrCat("key ", section, " stands outside of a section, as in [store]"));
    }
    if (const absl::Status status = CheckSection(section); !status.ok()) {
      return At(name, section_node.source(), std::string(status.message()));
    }
    for (const auto& [key, node] : *table) {
      const std::string path = absl::StrCat(section, ".", std::string(key.str()));
      if (const absl::Status status = SetFromNode(path, node, config); !status.ok()) {
        return At(name, node.source(), std::string(status.message()));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status LoadConfigFile(const std::string& path, Config& config) {
  constexpr size_t kMaxBytes = size_t{1} << 20;
  const absl::StatusOr<std::string> text = ReadText(path, kMaxBytes);
  if (!text.ok()) {
    return {text.status().code(), absl::StrCat("configuration file: ", text.status().message())};
  }
  return LoadConfigText(*text, path, config);
}

}  // namespace crumb
