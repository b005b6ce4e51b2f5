// SPDX-License-Identifier: Apache-2.0
//
// crumb-calibrate: from a model's statistics to the profile that engines and daemons share. Exit
// status: 0, 1 if the command failed, 2 for wrong arguments.
#include <functional>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "cuda/calibrate/commands.h"
#include "proto/base/arguments.h"

#include <CLI/CLI.hpp>

namespace crumb::calibrate {
namespace {

constexpr char kAbout[] =
    "Fits model profiles: how a model's keys and values are rotated and rounded to two bits.\n"
    "\n"
    "An engine collects statistics while it reads a few texts (crumb-example collect does for\n"
    "Llama models); this program turns them into a profile. Two engines share pages only if their\n"
    "profiles are the same file, byte for byte.";

constexpr char kFitExamples[] =
    "Examples:\n"
    "  crumb-calibrate fit stats.safetensors --out profile.safetensors\n"
    "      the default: oscar-int2-tilted, one rotation a KV head\n"
    "  crumb-calibrate fit stats.safetensors --out published.safetensors \\\n"
    "      --codec oscar-int2 --rotation per-layer\n"
    "      the recipe as published (arXiv 2605.17757)\n"
    "  crumb-calibrate fit stats.safetensors --out p.safetensors --key-rotation hadamard\n"
    "      keys by the Hadamard matrix alone: better for some models, so measure both";

constexpr char kImportExamples[] =
    "The files (versions 1 and 2) are read without PyTorch, and nothing in them is executed:\n"
    "what is not a dict, a number, a text or a float tensor is refused by name. Rotations stay\n"
    "as they are. With --stats, keys also get a mean shift and attention-aware rounding, which\n"
    "spares most of the loss of the published recipe.\n"
    "\n"
    "Examples:\n"
    "  crumb-calibrate import --k k_rotation_qqt_r_h_pbr.pt --v v_rotation_sst_r_h_pbr.pt \\\n"
    "      --kv-heads 8 --model Qwen3-8B --out qwen3-8b.safetensors\n"
    "      the recipe as published (oscar-int2); version 1 does not know the model's KV heads\n"
    "  crumb-calibrate import --k k.pt --v v.pt --stats stats.safetensors --out p.safetensors\n"
    "      the same rotations with what the statistics add (oscar-int2-aware)";

constexpr char kReportExamples[] =
    "One self-contained page: the error of attention by layer, head and recipe, where the loss\n"
    "sits, what other windows would leave of it, spectra, memory a token against BF16, and a\n"
    "verdict in words. The rows that statistics keep go through the real codec; for those that\n"
    "keep none, rows are drawn from each head's moments. Trust it to compare recipes and heads,\n"
    "and measure perplexity before you serve.\n"
    "\n"
    "Examples:\n"
    "  crumb-calibrate report stats.safetensors profile.safetensors --out report.html\n"
    "  crumb-calibrate report stats.safetensors profile.safetensors --out report.html \\\n"
    "      --json report.json --pages 16\n"
    "      the numbers as well; without rows in the statistics, steadier in four times the time";

constexpr char kInspectExamples[] =
    "Examples:\n"
    "  crumb-calibrate inspect profile.safetensors\n"
    "  crumb-calibrate inspect stats.safetensors\n"
    "  crumb-calibrate inspect profile.safetensors --stats stats.safetensors";

constexpr char kVerifyExamples[] =
    "Examples:\n"
    "  crumb-calibrate verify profile.safetensors\n"
    "  crumb-calibrate verify profile.safetensors --id 3f9c2ab1";

// A flag of one of a few words; `set` gets the word's value.
template <typename Value>
void AddChoice(CLI::App* app,
               const std::string& flag,
               const std::string& help,
               const std::map<std::string, Value>& words,
               std::function<void(Value)> set) {
  std::vector<std::string> names;
  names.reserve(words.size());
  for (const auto& [name, value] : words) {
    names.push_back(name);
  }
  app->add_option_function<std::string>(
         flag, [words, set](const std::string& name) { set(words.at(name)); }, help)
      ->check(CLI::IsMember(names))
      ->type_name("WORD");
}

std::map<std::string, CodecId> CodecWords() {
  std::map<std::string, CodecId> words;
  for (const CodecId codec : kCodecs) {
    words[std::string(CodecName(codec))] = codec;
  }
  return words;
}

void AddValueLevels(CLI::App* app, ValueLevels* levels) {
  AddChoice<ValueLevels>(
      app, "--value-levels",
      "How values are rounded under codecs with feedback: range (default), within their clipped "
      "range, or deviation, by each row's mean and deviation, so that none comes back smaller",
      {{"range", ValueLevels::kRange}, {"deviation", ValueLevels::kDeviation}},
      [levels](ValueLevels value) { *levels = value; });
}

struct Arguments {
  std::string statistics;
  std::string profile;
  std::string expected_id;
  FitOptions fit;
  ImportFiles import_files;
  ReportFiles report_files;
  ReportOptions report_options;
  ImportOptions import_options;
};

CLI::App* AddFit(CLI::App* app, Arguments* arguments) {
  CLI::App* fit = app->add_subcommand("fit", "Fit a profile to a statistics file");
  FitOptions& options = arguments->fit;
  fit->footer(kFitExamples);
  fit->add_option("statistics", arguments->statistics, "What an engine collected")
      ->required()
      ->type_name("FILE");
  fit->add_option("-o,--out", arguments->profile, "The profile to write; an old one is replaced")
      ->required()
      ->type_name("FILE");
  AddChoice<CodecId>(
      fit, "--codec",
      "How keys are rounded: oscar-int2-tilted (default), scaled, with error feedback, and each "
      "row's range searched and refitted for the queries that attend to it; oscar-int2-aware, "
      "with feedback and the search alone; oscar-int2-lm, without either, by the row's mean and "
      "deviation; or oscar-int2, to nearest, as published",
      CodecWords(), [&options](CodecId codec) { options.codec = codec; });
  const std::map<std::string, RotationKind> kinds = {{"per-head", RotationKind::kPerHead},
                                                     {"per-layer", RotationKind::kPerLayer},
                                                     {"hadamard", RotationKind::kHadamard}};
  // CLI11 calls back in this order, whatever the order of the flags, so the narrow flags win.
  AddChoice<RotationKind>(
      fit, "--rotation", "per-head (default), per-layer (heads share one), or hadamard", kinds,
      [&options](RotationKind kind) { options.key_rotation = options.value_rotation = kind; });
  AddChoice<RotationKind>(fit, "--key-rotation", "That of keys alone", kinds,
                          [&options](RotationKind kind) { options.key_rotation = kind; });
  AddChoice<RotationKind>(fit, "--value-rotation", "That of values alone", kinds,
                          [&options](RotationKind kind) { options.value_rotation = kind; });
  AddValueLevels(fit, &options.value_levels);
  AddChoice<KeyRangeSet>(
      fit, "--key-ranges",
      "Ranges that each key tries under codecs with feedback: codec (default, clip 0.98, 0.95, "
      "0.90), narrow (0.96, 0.92, 0.86) or chosen (head by head, as other recipes); other pages "
      "than the codec's are demoted on the CPU alone",
      {{"codec", KeyRangeSet::kCodec},
       {"narrow", KeyRangeSet::kNarrow},
       {"chosen", KeyRangeSet::kChosen}},
      [&options](KeyRangeSet set) { options.key_ranges = set; });
  fit->add_option("--key-clip", options.key_clip,
                  "Share of a key's channels within its range; 0 is off; oscar-int2 only")
      ->capture_default_str();
  fit->add_option("--value-clip", options.value_clip, "The same of values")->capture_default_str();
  fit->add_option("--sink", options.windows.sink_tokens, "First tokens kept in BF16")
      ->capture_default_str();
  fit->add_option("--recent", options.windows.recent_tokens, "Last tokens kept in BF16")
      ->capture_default_str();
  fit->add_flag("--shift,!--no-shift", options.shift_keys,
                "Subtract each head's mean key (default); not under oscar-int2");
  fit->add_flag(
      "--choose,!--no-choose", options.choose,
      "Give a head another recipe where attention on the statistics' rows loses less by it "
      "(default); oscar-int2-tilted only");
  fit->add_option("--key-margin", options.key_choice_margin,
                  "By what share its keys must lose less for that, on either half of the rows")
      ->capture_default_str();
  fit->add_option("--value-margin", options.value_choice_margin, "The same of values")
      ->capture_default_str();
  fit->add_option("--damping", options.damping,
                  "Trust in the metric: what is added to its diagonal, in units of its mean")
      ->capture_default_str();
  return fit;
}

CLI::App* AddImport(CLI::App* app, Arguments* arguments) {
  CLI::App* command = app->add_subcommand(
      "import", "Make a profile of the rotations that OSCAR published, torch.save files");
  command->footer(kImportExamples);
  ImportOptions& options = arguments->import_options;
  command->add_option("--k", arguments->import_files.keys, "The keys' rotations (.pt)")
      ->required()
      ->type_name("FILE");
  command->add_option("--v", arguments->import_files.values, "The values' rotations (.pt)")
      ->required()
      ->type_name("FILE");
  command
      ->add_option("--stats", arguments->import_files.statistics,
                   "Statistics of the same model; adds feedback factors and mean keys")
      ->type_name("FILE");
  AddChoice<CodecId>(
      command, "--codec",
      "oscar-int2 (default), as published; oscar-int2-lm; or with --stats oscar-int2-aware (then "
      "the default). See fit",
      CodecWords(), [&options](CodecId codec) { options.codec = codec; });
  AddValueLevels(command, &options.value_levels);
  command
      ->add_option("-o,--out", arguments->profile, "The profile to write; an old one is replaced")
      ->required()
      ->type_name("FILE");
  command->add_option("--kv-heads", options.num_kv_heads,
                      "KV heads of the model, where neither the files nor --stats say");
  command->add_option("--model", options.model, "The model's name, for people")->type_name("NAME");
  command
      ->add_option("--key-clip", options.key_clip,
                   "Share of a key's channels within its range; 0 is off; oscar-int2 only")
      ->capture_default_str();
  command->add_option("--value-clip", options.value_clip, "The same of values")
      ->capture_default_str();
  command->add_option("--sink", options.windows.sink_tokens, "First tokens kept in BF16")
      ->capture_default_str();
  command->add_option("--recent", options.windows.recent_tokens, "Last tokens kept in BF16")
      ->capture_default_str();
  command->add_option("--damping", options.damping, "As of fit; oscar-int2-aware only")
      ->capture_default_str();
  return command;
}

CLI::App* AddReport(CLI::App* app, Arguments* arguments) {
  CLI::App* report = app->add_subcommand("report", "What a profile is expected to cost, as a page");
  report->footer(kReportExamples);
  report->add_option("statistics", arguments->report_files.statistics, "Of the model")
      ->required()
      ->type_name("FILE");
  report->add_option("profile", arguments->report_files.profile, "Fitted or imported")
      ->required()
      ->type_name("FILE");
  report->add_option("-o,--out", arguments->report_files.page, "The page (HTML) to write")
      ->required()
      ->type_name("FILE");
  report->add_option("--json", arguments->report_files.json, "The same numbers, for programs")
      ->type_name("FILE");
  report
      ->add_option("--pages", arguments->report_options.num_pages,
                   "Pages of 64 keys to draw a head, of statistics without rows")
      ->capture_default_str();
  return report;
}

int Main(int argc, char** argv) {
  Arguments arguments;
  CLI::App app{kAbout, "crumb-calibrate"};
  app.require_subcommand(0, 1);
  const CLI::App* fit = AddFit(&app, &arguments);
  const CLI::App* import_command = AddImport(&app, &arguments);
  const CLI::App* report = AddReport(&app, &arguments);

  CLI::App* inspect = app.add_subcommand("inspect", "Describe a profile or a statistics file");
  inspect->footer(kInspectExamples);
  inspect->add_option("file", arguments.profile, "The file")->required()->type_name("FILE");
  inspect
      ->add_option("--stats", arguments.statistics,
                   "Statistics of the profile's model: shows how equal its channels are")
      ->type_name("FILE");

  CLI::App* verify = app.add_subcommand("verify", "Check a profile; exit status 1 if it is bad");
  verify->footer(kVerifyExamples);
  verify->add_option("profile", arguments.profile, "The profile")->required()->type_name("FILE");
  verify->add_option("--id", arguments.expected_id, "The id it must have, or how that begins")
      ->type_name("HEX");

  if (const absl::Status wrong = CheckFlagsHaveValues(argc, argv); !wrong.ok()) {
    std::cerr << "crumb-calibrate: " << wrong.message() << "\n";
    return 2;
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  if (app.get_subcommands().empty()) {
    std::cerr << app.help();
    return 2;
  }
  const Streams streams{std::cout, std::cerr};
  absl::Status status;
  if (fit->parsed()) {
    status = Fit(arguments.statistics, arguments.fit, arguments.profile, streams);
  } else if (import_command->parsed()) {
    status = Import(arguments.import_files, arguments.import_options, arguments.profile, streams);
  } else if (report->parsed()) {
    status = Report(arguments.report_files, arguments.report_options, streams);
  } else if (inspect->parsed()) {
    status = Inspect(arguments.profile, arguments.statistics, streams);
  } else {
    status = Verify(arguments.profile, arguments.expected_id, streams);
  }
  if (!status.ok()) {
    std::cerr << "crumb-calibrate: " << status.message() << "\n";
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace crumb::calibrate

int main(int argc, char** argv) {
  return crumb::calibrate::Main(argc, argv);
}
