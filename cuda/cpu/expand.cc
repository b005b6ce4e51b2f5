// SPDX-License-Identifier: Apache-2.0
#include "crumb/cuda/expand.h"

#include <algorithm>
#include <vector>

#include "crumb/cuda/rotate.h"
#include "cuda/cpu/expand_kernel.h"
#include "cuda/cpu/pack_codes.h"
#include "cuda/reference/expand.h"
#include "proto/base/check.h"
#include "proto/page/page_format.h"

namespace crumb {
namespace {

const cpu::ExpandFunctions& FunctionsOf(CpuPath path) {
#if defined(__x86_64__)
  if (path == CpuPath::kAvx512) {
    return cpu::Avx512ExpandFunctions();
  }
  if (path == CpuPath::kAvx2) {
    return cpu::Avx2ExpandFunctions();
  }
#endif
  CRUMB_CHECK(path == CpuPath::kPortable, "this path is not in the build");
  return cpu::PortableExpandFunctions();
}

// Rows of the rotated space back to the model's: rows * rotation^T + mean (nullable).
void ToModelSpace(const float* rotation,
                  const float* mean,
                  uint32_t dim,
                  std::span<const float> rows,
                  std::span<BFloat16> out,
                  CpuPath path) {
  // The inverse of a rotation of keys is that of values with the same matrix.
  const HeadParameters head{.value_dim = dim, .value_rotation = rotation};
  std::vector<float> model(rows.size());
  UnrotateOutputs(head, rows, model, path);
  FunctionsOf(path).round(model.data(), mean, dim, out.data());
}

}  // namespace

void ExpandHeadBlock(const HeadParameters& head,
                     std::span<const std::byte> block,
                     ExpandSpace space,
                     std::span<BFloat16> keys,
                     std::span<BFloat16> values,
                     CpuPath path) {
  const Int2HeadBlock format{head.key_dim, head.value_dim};
  CRUMB_CHECK(keys.size() == size_t{kPageTokens} * head.key_dim, "keys of another length");
  CRUMB_CHECK(values.size() == size_t{kPageTokens} * head.value_dim, "values of another length");
  CRUMB_CHECK(block.size() == format.bytes(), "block of another length");
  if (path == CpuPath::kReference) {
    reference::ExpandHeadBlock(head, block, space, keys, values);
    return;
  }
  const cpu::ExpandFunctions& functions = FunctionsOf(path);
  std::vector<uint8_t> key_codes(keys.size());
  std::vector<uint8_t> value_codes(values.size());
  cpu::UnpackKeyCodes(block.data() + format.key_codes_offset(), head.key_dim, key_codes.data());
  cpu::UnpackValueCodes(block.data() + format.value_codes_offset(), head.value_dim,
                        value_codes.data());
  const std::byte* key_meta = block.data() + format.key_meta_offset();
  const std::byte* value_meta = block.data() + format.value_meta_offset();
  if (space == ExpandSpace::kRotated) {
    functions.decode_to_bf16(key_codes.data(), key_meta, head.key_dim, keys.data());
    functions.decode_to_bf16(value_codes.data(), value_meta, head.value_dim, values.data());
    return;
  }
  std::vector<float> rows(std::max(keys.size(), values.size()));
  functions.decode_to_float(key_codes.data(), key_meta, head.key_dim, rows.data());
  // The queries' transform is the transposed inverse of the keys', so its transpose undoes that.
  ToModelSpace(head.query_rotation != nullptr ? head.query_rotation : head.key_rotation,
               head.key_mean, head.key_dim, std::span(rows).first(keys.size()), keys, path);
  functions.decode_to_float(value_codes.data(), value_meta, head.value_dim, rows.data());
  ToModelSpace(head.value_rotation, nullptr, head.value_dim, std::span(rows).first(values.size()),
               values, path);
}

}  // namespace crumb
