// SPDX-License-Identifier: Apache-2.0
//
// Words that blocks of one launch hand to one another through device memory without a barrier.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace crumb::gpu {

// Each word of a vector by itself as a relaxed atomic, at the cache that all multiprocessors share.
// kPlace: of the vector from `source` or `target` on; a part of the instruction.
template <int kPlace = 0>
__device__ __forceinline__ float4 LoadRelaxed(const float4* source) {
  float4 value;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0,%1,%2,%3}, [%4+%5];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "l"(source), "n"(kPlace * sizeof(float4))
               : "memory");
  return value;
}
template <int kPlace = 0>
__device__ __forceinline__ float2 LoadRelaxed(const float2* source) {
  float2 value;
  asm volatile("ld.relaxed.gpu.global.v2.f32 {%0,%1}, [%2+%3];"
               : "=f"(value.x), "=f"(value.y)
               : "l"(source), "n"(kPlace * sizeof(float2))
               : "memory");
  return value;
}
template <int kPlace = 0>
__device__ __forceinline__ void StoreRelaxed(float4* target, float4 value) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0+%5], {%1,%2,%3,%4};" ::"l"(target), "f"(value.x),
               "f"(value.y), "f"(value.z), "f"(value.w), "n"(kPlace * sizeof(float4))
               : "memory");
}
__device__ __forceinline__ void StoreRelaxed(float2* target, float2 value) {
  asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1,%2};" ::"l"(target), "f"(value.x),
               "f"(value.y)
               : "memory");
}

// Nanoseconds, of a clock that all multiprocessors share.
__device__ __forceinline__ uint64_t DeviceNanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

}  // namespace crumb::gpu
