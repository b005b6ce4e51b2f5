// SPDX-License-Identifier: Apache-2.0
//
// PTX instructions that CUDA C++ has no words for, one small function each. Compute capability 8.0
// and later; what needs 9.0 has its older form beside it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace crumb::gpu {

inline constexpr unsigned kFullWarp = 0xffffffffu;

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// threadIdx.x, read anew: what is computed from it is not kept in registers from one call to the
// next, for code that runs seldom within a loop whose registers are short.
__device__ __forceinline__ int ThreadAnew() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float Log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x to the last bit but one, for x that is no subnormal.
__device__ __forceinline__ float Reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// c += A x B with A[16 x 32] of unsigned and B[32 x 8] of signed bytes; exact.
__device__ __forceinline__ void MmaU8S8(int (&c)[4],
                                        const uint32_t (&a)[4],
                                        uint32_t b0,
                                        uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
      "{%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// c += A x B with A[16 x 16] of bf16, of which rows 8..15 are zero, and B[16 x 8].
__device__ __forceinline__ void MmaBf16Rows8(float (&c)[4], uint32_t a0, uint32_t a2, uint2 b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%5},{%7,%8},"
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(0), "r"(a2), "r"(b.x), "r"(b.y));
}

// c += A x B with A[16 x 8] and B[8 x 8] of bf16.
__device__ __forceinline__ void MmaBf16K8(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5},{%6},"
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b));
}

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void LoadMatrices(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(SharedAddress(row))
               : "memory");
}
__device__ __forceinline__ void LoadMatricesTransposed(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(SharedAddress(row))
               : "memory");
}

// Starts to bring a line of device memory to the cache that all multiprocessors share.
__device__ __forceinline__ void PrefetchToL2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Of `kThreads` threads of the block, which say the same id, 1 to 15.
template <int kId, int kThreads>
__device__ __forceinline__ void NamedBarrier() {
  asm volatile("bar.sync %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
}

// Barriers in shared memory that count arrivals and, from 9.0 on, bytes.

__device__ __forceinline__ void BarrierInit(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(SharedAddress(barrier)), "r"(arrivals)
               : "memory");
}
// After the inits, before another unit (the copy engine) uses the barriers.
__device__ __forceinline__ void BarrierInitFence() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
// Waits until the phase of this parity is complete.
__device__ __forceinline__ void BarrierWait(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  do {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(SharedAddress(barrier)), "r"(parity)
        : "memory");
#else
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(SharedAddress(barrier)), "r"(parity)
        : "memory");
#endif
  } while (done == 0);
}

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void BarrierArriveExpect(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)),
      "r"(bytes)
      : "memory");
}
__device__ __forceinline__ void BarrierArrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SharedAddress(barrier)) : "memory");
}
// Copies contiguous bytes, a multiple of 16 at 16-byte aligned addresses, and counts them at the
// barrier when they are there.
__device__ __forceinline__ void BulkCopy(void* target,
                                         const void* source,
                                         uint32_t bytes,
                                         uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(SharedAddress(target)),
      "l"(source), "r"(bytes), "r"(SharedAddress(barrier))
      : "memory");
}
// The same of bytes that will not be read again soon: they leave the caches first.
__device__ __forceinline__ void BulkCopyOnce(void* target,
                                             const void* source,
                                             uint32_t bytes,
                                             uint64_t* barrier) {
  // What createpolicy.fractional.L2::evict_first makes (as CUTLASS, cute/arch/copy_sm90_desc.hpp).
  constexpr uint64_t kEvictFirst = 0x12f0000000000000;
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1], "
      "%2, [%3], %4;" ::"r"(SharedAddress(target)),
      "l"(source), "r"(bytes), "r"(SharedAddress(barrier)), "l"(kEvictFirst)
      : "memory");
}
#else
__device__ __forceinline__ void AsyncCopy16(void* target, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(SharedAddress(target)), "l"(source)
               : "memory");
}
// Arrives at the barrier once all copies that this thread issued so far are there.
__device__ __forceinline__ void BarrierArriveOnCopies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(SharedAddress(barrier))
               : "memory");
}
#endif

// Orders this thread's ordinary accesses of shared memory before later ones of the copy engine.
__device__ __forceinline__ void AsyncProxyFence() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Until all work before this launch on its stream has ended and its writes are seen. Returns at
// once in a launch that is not a programmatic dependent of another.
__device__ __forceinline__ void WaitForEarlierWork() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The next launch on the stream, if it is a programmatic dependent, may start to be scheduled.
__device__ __forceinline__ void LetNextLaunchStart() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace crumb::gpu
