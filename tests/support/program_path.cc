// SPDX-License-Identifier: Apache-2.0
#include "tests/support/program_path.h"

namespace crumb {

std::filesystem::path ProgramPath(const std::string& name) {
  std::error_code ignored;
  const auto beside = std::filesystem::read_symlink("/proc/self/exe", ignored).parent_path() / name;
  return std::filesystem::exists(beside, ignored) ? beside
                                                  : std::filesystem::path(CRUMB_PROGRAM_DIR) / name;
}

}  // namespace crumb
