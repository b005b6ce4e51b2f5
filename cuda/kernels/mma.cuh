// SPDX-License-Identifier: Apache-2.0
//
// Matrix products and asynchronous copies that the page ops share. Compute capability 8.0 and
// later.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "cuda/kernels/ptx.cuh"

namespace crumb::gpu {

// c += A x B with A[16 x 16] and B[16 x 8] of bf16.
__device__ __forceinline__ void MmaBf16(float (&c)[4],
                                        const uint32_t (&a)[4],
                                        uint32_t b0,
                                        uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// c += A x B with A[16 x 16] and B[16 x 8] of fp16.
__device__ __forceinline__ void MmaF16(float (&c)[4],
                                       const uint32_t (&a)[4],
                                       uint32_t b0,
                                       uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// The same with sums in fp16 too: c[0] is columns 2t, 2t + 1 of row g, c[1] of row g + 8.
__device__ __forceinline__ void MmaF16Short(uint32_t (&c)[2],
                                            const uint32_t (&a)[4],
                                            uint32_t b0,
                                            uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1},{%2,%3,%4,%5},{%6,%7},{%0,%1};"
      : "+r"(c[0]), "+r"(c[1])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Where lane `lane` points LoadMatrices for the A operand whose first element is at `tile`, rows
// `stride` bytes apart.
__device__ __forceinline__ const std::byte* OperandRow(const std::byte* tile,
                                                       uint32_t stride,
                                                       int lane) {
  return tile + (lane % 16) * stride + (lane / 16) * 16;
}

// Two floats as a bf16 pair, the first in the low half.
__device__ __forceinline__ uint32_t PackBf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  uint32_t word;
  memcpy(&word, &pair, sizeof(word));
  return word;
}

// By address in shared memory.
__device__ __forceinline__ void LoadMatricesTransposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
// Four 8x8 matrices of 16-bit elements that lie as two by two, rows `stride` bytes apart from
// `tile` on: above, below, and the same of the next eight columns. As LoadMatrices of OperandRow
// has them, or a product's sums.
__device__ __forceinline__ void LoadTile(uint32_t (&r)[4],
                                         uint32_t tile,
                                         uint32_t stride,
                                         int lane) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(tile + lane % 16 * stride + lane / 16 * 16)
               : "memory");
}
__device__ __forceinline__ void StoreTile(const uint32_t (&r)[4],
                                          uint32_t tile,
                                          uint32_t stride,
                                          int lane) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%4],{%0,%1,%2,%3};" ::"r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3]), "r"(tile + lane % 16 * stride + lane / 16 * 16)
               : "memory");
#else
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(tile + (lane / 4 + i % 2 * 8) * stride +
                                                 lane % 4 * 4 + i / 2 * 16),
                 "r"(r[i])
                 : "memory");
  }
#endif
}
__device__ __forceinline__ uint32_t LoadShared(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}
__device__ __forceinline__ void StoreShared(uint32_t address, uint32_t word) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}

__device__ __forceinline__ void CopyAsync16(void* target, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(SharedAddress(target)), "l"(source)
               : "memory");
}
// Zeros if there is no source, without a branch.
__device__ __forceinline__ void CopyAsync16OrZeros(void* target,
                                                   const void* source,
                                                   bool has_source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(SharedAddress(target)),
               "l"(source), "r"(has_source ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void CommitCopies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Until all but the newest `kPending` groups of this thread's copies are there.
template <int kPending>
__device__ __forceinline__ void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace crumb::gpu
