// SPDX-License-Identifier: Apache-2.0
//
// Where the programs are that tests and benchmarks start.
#pragma once

#include <filesystem>
#include <string>

namespace crumb {

// `name` in the folder of the running program, if it is there, as where tests were packed up and
// brought to another machine; else in the build's bin.
std::filesystem::path ProgramPath(const std::string& name);

}  // namespace crumb
