// SPDX-License-Identifier: Apache-2.0
#include "client/example/gguf_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"

#include "proto/base/status_macros.h"
#include "proto/base/unique_fd.h"

namespace crumb::example {

absl::StatusOr<std::unique_ptr<GgufFile>> GgufFile::Open(const std::filesystem::path& path) {
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.is_valid()) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot open the model ", path.string()));
  }
  struct stat status {};
  if (fstat(fd.get(), &status) != 0 || !S_ISREG(status.st_mode) || status.st_size == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(path.string(), ": not a file, or empty: name the model's GGUF file"));
  }
  const auto num_bytes = static_cast<size_t>(status.st_size);
  void* memory = mmap(nullptr, num_bytes, PROT_READ, MAP_PRIVATE, fd.get(), 0);
  if (memory == MAP_FAILED) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot map the model ", path.string()));
  }
  std::unique_ptr<GgufFile> file(new GgufFile(path));
  file->mapping_ = {static_cast<const std::byte*>(memory), num_bytes};
  absl::StatusOr<GgufContents> contents = ParseGguf(file->mapping_);
  if (!contents.ok()) {
    return absl::Status(contents.status().code(),
                        absl::StrCat(path.string(), ": ", contents.status().message()));
  }
  file->contents_ = *std::move(contents);
  return file;
}

GgufFile::~GgufFile() {
  munmap(const_cast<std::byte*>(mapping_.data()), mapping_.size());
}

template <typename T>
absl::StatusOr<const T*> GgufFile::Get(absl::string_view key, absl::string_view type) const {
  const auto found = contents_.metadata.find(key);
  if (found == contents_.metadata.end()) {
    return absl::InvalidArgumentError(absl::StrCat(path_.string(), ": no key ", key));
  }
  const T* value = std::get_if<T>(&found->second);
  if (value == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat(path_.string(), ": key ", key, " is not ", type));
  }
  return value;
}

absl::StatusOr<uint32_t> GgufFile::GetUint(absl::string_view key,
                                           uint32_t low,
                                           uint32_t high) const {
  CRUMB_ASSIGN_OR_RETURN(const int64_t* value, Get<int64_t>(key, "an integer"));
  if (*value < low || *value > high) {
    return absl::InvalidArgumentError(absl::StrCat(path_.string(), ": key ", key, " is ", *value,
                                                   ", it must be from ", low, " to ", high));
  }
  return static_cast<uint32_t>(*value);
}

absl::StatusOr<float> GgufFile::GetFloat(absl::string_view key) const {
  CRUMB_ASSIGN_OR_RETURN(const double* value, Get<double>(key, "a float"));
  return static_cast<float>(*value);
}

absl::StatusOr<std::string> GgufFile::GetString(absl::string_view key) const {
  CRUMB_ASSIGN_OR_RETURN(const std::string* value, Get<std::string>(key, "a string"));
  return *value;
}

absl::StatusOr<std::span<const int64_t>> GgufFile::GetIntegers(absl::string_view key) const {
  CRUMB_ASSIGN_OR_RETURN(const auto* value, Get<std::vector<int64_t>>(key, "an array of integers"));
  return std::span<const int64_t>(*value);
}

absl::StatusOr<std::span<const std::string>> GgufFile::GetStrings(absl::string_view key) const {
  CRUMB_ASSIGN_OR_RETURN(const auto* value,
                         Get<std::vector<std::string>>(key, "an array of strings"));
  return std::span<const std::string>(*value);
}

const GgufTensor* GgufFile::FindTensor(absl::string_view name) const {
  const auto found = contents_.tensors.find(name);
  return found == contents_.tensors.end() ? nullptr : &found->second;
}

}  // namespace crumb::example
