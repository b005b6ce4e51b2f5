// SPDX-License-Identifier: Apache-2.0
//
// Two 16-bit numbers in a word: as bits, as bf16 and as fp16.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

namespace crumb::gpu {

__device__ __forceinline__ uint32_t AsWord(__nv_bfloat162 pair) {
  uint32_t word;
  memcpy(&word, &pair, sizeof(word));
  return word;
}
__device__ __forceinline__ __nv_bfloat162 AsPair(uint32_t word) {
  __nv_bfloat162 pair;
  memcpy(&pair, &word, sizeof(pair));
  return pair;
}
__device__ __forceinline__ __half2 AsHalves(uint32_t word) {
  __half2 pair;
  memcpy(&pair, &word, sizeof(pair));
  return pair;
}
__device__ __forceinline__ uint32_t AsWord(__half2 pair) {
  uint32_t word;
  memcpy(&word, &pair, sizeof(word));
  return word;
}
// Half `which` of a word, twice.
__device__ __forceinline__ __half2 HalfOf(uint32_t word, int which) {
  return which == 0 ? __low2half2(AsHalves(word)) : __high2half2(AsHalves(word));
}
// Both halves of a word, each from one half of the operands.
__device__ __forceinline__ uint32_t LowHalves(uint32_t a, uint32_t b) {
  return __byte_perm(a, b, 0x5410);
}
__device__ __forceinline__ uint32_t HighHalves(uint32_t a, uint32_t b) {
  return __byte_perm(a, b, 0x7632);
}

}  // namespace crumb::gpu
