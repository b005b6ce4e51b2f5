// SPDX-License-Identifier: Apache-2.0
//
// Makes GGUF files in memory, well formed or not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace crumb::example {

class GgufBuilder {
 public:
  GgufBuilder& Key(std::string_view key, std::string_view value) {
    KeyStart(key, 8);
    String(keys_, value);
    return *this;
  }
  GgufBuilder& Key(std::string_view key, uint32_t value) {
    KeyStart(key, 4);
    Put(keys_, value);
    return *this;
  }
  GgufBuilder& Key(std::string_view key, float value) {
    KeyStart(key, 6);
    Put(keys_, value);
    return *this;
  }
  GgufBuilder& Key(std::string_view key, const std::vector<std::string>& values) {
    KeyStart(key, 9);
    Put(keys_, uint32_t{8});
    Put(keys_, uint64_t{values.size()});
    for (const std::string& value : values) {
      String(keys_, value);
    }
    return *this;
  }
  GgufBuilder& Key(std::string_view key, const std::vector<int32_t>& values) {
    KeyStart(key, 9);
    Put(keys_, uint32_t{5});
    Put(keys_, uint64_t{values.size()});
    for (const int32_t value : values) {
      Put(keys_, value);
    }
    return *this;
  }
  // A key whose value is these bytes, whatever they are.
  GgufBuilder& RawKey(std::string_view key, uint32_t type, std::string_view bytes) {
    KeyStart(key, type);
    keys_.append(bytes);
    return *this;
  }

  GgufBuilder& FloatTensor(std::string_view name,
                           const std::vector<uint64_t>& dims,
                           const std::vector<float>& values) {
    return RawTensor(name, dims, 0, data_.size(),
                     std::string_view(reinterpret_cast<const char*>(values.data()),
                                      values.size() * sizeof(float)));
  }
  GgufBuilder& RawTensor(std::string_view name,
                         const std::vector<uint64_t>& dims,
                         uint32_t type,
                         uint64_t offset,
                         std::string_view bytes) {
    String(tensors_, name);
    Put(tensors_, static_cast<uint32_t>(dims.size()));
    for (const uint64_t dim : dims) {
      Put(tensors_, dim);
    }
    Put(tensors_, type);
    Put(tensors_, offset);
    data_.append(bytes);
    data_.resize((data_.size() + 31) / 32 * 32);
    ++num_tensors_;
    return *this;
  }

  std::string Build(uint32_t version = 3) const {
    std::string file = "GGUF";
    Put(file, version);
    Put(file, num_tensors_);
    Put(file, num_keys_);
    file += keys_ + tensors_;
    file.resize((file.size() + 31) / 32 * 32);
    return file + data_;
  }

  template <typename T>
  static void Put(std::string& out, T value) {
    out.append(reinterpret_cast<const char*>(&value), sizeof(T));
  }
  static void String(std::string& out, std::string_view text) {
    Put(out, uint64_t{text.size()});
    out.append(text);
  }

 private:
  void KeyStart(std::string_view key, uint32_t type) {
    String(keys_, key);
    Put(keys_, type);
    ++num_keys_;
  }

  std::string keys_;
  std::string tensors_;
  std::string data_;
  uint64_t num_keys_ = 0;
  uint64_t num_tensors_ = 0;
};

inline std::span<const std::byte> AsBytes(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

}  // namespace crumb::example
