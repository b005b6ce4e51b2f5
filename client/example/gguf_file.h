// SPDX-License-Identifier: Apache-2.0
//
// Reader of GGUF model files, versions 2 and 3 (ggml's docs/gguf.md): metadata and tensors, mapped
// into memory and never copied. Nothing in the file is trusted: every count, length, dimension and
// offset is checked against the file's size before it is used. Immutable once open; Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

#include "client/example/dequantize.h"

namespace crumb::example {

// A tensor as it lies in the file.
struct GgufTensor {
  std::string name;
  std::vector<uint64_t> dims;  // The fastest-moving first: a matrix is {columns, rows}.
  GgmlType type = GgmlType::kF32;
  std::span<const std::byte> bytes;  // Within the mapping; alive as long as the GgufFile.

  uint64_t num_columns() const { return dims.empty() ? 1 : dims[0]; }
  uint64_t num_rows() const { return dims.size() < 2 ? 1 : dims[1]; }
};

// A metadata value: integers of every width as int64, floats as double, arrays by their element.
using GgufValue = std::variant<int64_t,
                               double,
                               bool,
                               std::string,
                               std::vector<int64_t>,
                               std::vector<double>,
                               std::vector<std::string>>;

struct GgufContents {
  std::map<std::string, GgufValue, std::less<>> metadata;
  std::map<std::string, GgufTensor, std::less<>> tensors;
};

// What a file of these bytes contains; the tensors are views into them. INVALID_ARGUMENT: not GGUF,
// another version, truncated, or a length that the file cannot hold; names the key or tensor, the
// value and the limit. Thread-safe.
absl::StatusOr<GgufContents> ParseGguf(std::span<const std::byte> bytes);

class GgufFile {
 public:
  // NOT_FOUND: no such file. INVALID_ARGUMENT as ParseGguf.
  static absl::StatusOr<std::unique_ptr<GgufFile>> Open(const std::filesystem::path& path);
  ~GgufFile();
  GgufFile(const GgufFile&) = delete;
  GgufFile& operator=(const GgufFile&) = delete;

  // The value of a key. INVALID_ARGUMENT names the key when it is absent, of another type, or
  // outside [low, high].
  absl::StatusOr<uint32_t> GetUint(absl::string_view key, uint32_t low, uint32_t high) const;
  absl::StatusOr<float> GetFloat(absl::string_view key) const;
  absl::StatusOr<std::string> GetString(absl::string_view key) const;
  absl::StatusOr<std::span<const int64_t>> GetIntegers(absl::string_view key) const;
  absl::StatusOr<std::span<const std::string>> GetStrings(absl::string_view key) const;
  bool HasKey(absl::string_view key) const { return contents_.metadata.contains(key); }

  // Null when there is none of that name.
  const GgufTensor* FindTensor(absl::string_view name) const;
  const std::map<std::string, GgufTensor, std::less<>>& tensors() const {
    return contents_.tensors;
  }
  const std::filesystem::path& path() const { return path_; }

 private:
  explicit GgufFile(std::filesystem::path path) : path_(std::move(path)) {}
  template <typename T>
  absl::StatusOr<const T*> Get(absl::string_view key, absl::string_view type) const;

  std::filesystem::path path_;
  std::span<const std::byte> mapping_;
  GgufContents contents_;
};

}  // namespace crumb::example
