// SPDX-License-Identifier: Apache-2.0
//
// The example engine's model files.
#include <cstdio>
#include <cstdlib>
#include <functional>

#include "client/example/gguf_file.h"
#include "tests/fuzz/fuzz_subject.h"

namespace crumb {
namespace {

// Writes the pieces of a small file, by ggml's docs/gguf.md.
class GgufWriter {
 public:
  template <typename T>
  void Put(T value) {
    file_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  void PutString(const std::string& text) {
    Put<uint64_t>(text.size());
    file_ += text;
  }
  void Pad(size_t alignment) {
    file_.resize((file_.size() + alignment - 1) / alignment * alignment);
  }
  std::vector<std::byte> Take() const {
    const auto bytes = std::as_bytes(std::span(file_));
    return {bytes.begin(), bytes.end()};
  }

 private:
  std::string file_;
};

std::vector<std::byte> SmallFile() {
  constexpr uint32_t kUint32 = 4;
  constexpr uint32_t kString = 8;
  constexpr uint32_t kArray = 9;
  GgufWriter writer;
  writer.Put<uint32_t>(0x46554747);  // "GGUF"
  writer.Put<uint32_t>(3);
  writer.Put<uint64_t>(1);  // Tensors.
  writer.Put<uint64_t>(3);  // Keys.
  writer.PutString("general.architecture");
  writer.Put(kString);
  writer.PutString("llama");
  writer.PutString("llama.block_count");
  writer.Put(kUint32);
  writer.Put<uint32_t>(1);
  writer.PutString("tokens");
  writer.Put(kArray);
  writer.Put(kString);
  writer.Put<uint64_t>(2);
  writer.PutString("a");
  writer.PutString("b");
  writer.PutString("output_norm.weight");
  writer.Put<uint32_t>(1);  // Dimensions.
  writer.Put<uint64_t>(32);
  writer.Put<uint32_t>(0);  // F32.
  writer.Put<uint64_t>(0);  // Offset.
  writer.Pad(32);
  for (int element = 0; element < 32; ++element) {
    writer.Put(1.0f);
  }
  return writer.Take();
}

}  // namespace

std::vector<FuzzSeed> FuzzSeeds() {
  return {{"small", SmallFile()}};
}

bool FuzzOne(std::span<const std::byte> input) {
  const absl::StatusOr<example::GgufContents> contents = example::ParseGguf(input);
  if (!contents.ok()) {
    if (contents.status().message().empty()) {
      std::abort();
    }
    return false;
  }
  const std::less_equal<> not_after;
  for (const auto& [name, tensor] : contents->tensors) {
    if (tensor.bytes.empty()) {
      continue;
    }
    if (!not_after(input.data(), tensor.bytes.data()) ||
        !not_after(tensor.bytes.data() + tensor.bytes.size(), input.data() + input.size())) {
      std::fprintf(stderr, "tensor %s lies outside of the file\n", name.c_str());
      std::abort();
    }
  }
  return true;
}

}  // namespace crumb
