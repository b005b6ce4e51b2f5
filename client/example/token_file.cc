// SPDX-License-Identifier: Apache-2.0
#include "client/example/token_file.h"

#include <cerrno>
#include <cstddef>
#include <fstream>
#include <ios>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace crumb::example {

absl::StatusOr<TokenFile> TokenFile::Read(const std::filesystem::path& path,
                                          uint32_t text_tokens,
                                          uint32_t vocabulary_size) {
  std::error_code error;
  const uintmax_t num_bytes = std::filesystem::file_size(path, error);
  if (error) {
    return absl::ErrnoToStatus(error.value(), absl::StrCat("cannot read ", path.string()));
  }
  const uintmax_t text_bytes = uintmax_t{text_tokens} * sizeof(uint32_t);
  if (num_bytes == 0 || text_bytes == 0 || num_bytes % text_bytes != 0) {
    return absl::InvalidArgumentError(absl::StrCat(path.string(), ": ", num_bytes,
                                                   " bytes are not a whole number of texts of ",
                                                   text_tokens, " token ids of 4 bytes"));
  }
  std::vector<uint32_t> ids(num_bytes / sizeof(uint32_t));
  std::ifstream file(path, std::ios::binary);
  if (!file.read(reinterpret_cast<char*>(ids.data()), static_cast<std::streamsize>(num_bytes))) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot read ", path.string()));
  }
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= vocabulary_size) {
      return absl::InvalidArgumentError(absl::StrCat(path.string(), ": id ", ids[i], " at index ",
                                                     i, " is beyond the vocabulary of ",
                                                     vocabulary_size, " tokens"));
    }
  }
  return TokenFile(std::move(ids), text_tokens);
}

}  // namespace crumb::example
