// SPDX-License-Identifier: Apache-2.0
//
// Elements of the GPU ops' queries and outputs, for their twins.
#pragma once

#include <cstddef>

#include "crumb/cuda/decode_params.h"
#include "proto/base/bfloat16.h"
#include "proto/base/float16.h"

namespace crumb {

inline float LoadElement(const void* data, size_t index, ElementType type) {
  switch (type) {
    case ElementType::kBf16:
      return static_cast<const BFloat16*>(data)[index].ToFloat();
    case ElementType::kFp16:
      return static_cast<const Float16*>(data)[index].ToFloat();
    default:
      return static_cast<const float*>(data)[index];
  }
}

inline void StoreElement(void* data, size_t index, ElementType type, float value) {
  switch (type) {
    case ElementType::kBf16:
      static_cast<BFloat16*>(data)[index] = BFloat16::FromFloat(value);
      break;
    case ElementType::kFp16:
      static_cast<Float16*>(data)[index] = Float16::FromFloat(value);
      break;
    default:
      static_cast<float*>(data)[index] = value;
  }
}

}  // namespace crumb
