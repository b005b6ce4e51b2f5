// SPDX-License-Identifier: Apache-2.0
//
// Hopper's asynchronous matrix product of a warpgroup (four warps), A from registers. For files
// that are compiled for sm_90a; elsewhere nothing of it may be called.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/kernels/ptx.cuh"

namespace crumb::gpu {

// Whether this is compiled for them.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
inline constexpr bool kHasWarpgroups = true;
#else
inline constexpr bool kHasWarpgroups = false;
#endif

// How PTX calls an operand's elements.
template <typename Element>
struct WgmmaElement;
template <>
struct WgmmaElement<__half> {
  static constexpr char kName[] = "f16";
};
template <>
struct WgmmaElement<__nv_bfloat16> {
  static constexpr char kName[] = "bf16";
};

// What inline assembly must list: the names of a product's sums, %0 and on, and the operands
// themselves, `how` being their constraint. Each number of sums is the next smaller and some more.
#define CRUMB_SUM_NAMES_32                                                      \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, " \
  "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define CRUMB_SUM_NAMES_36 CRUMB_SUM_NAMES_32 ", %32, %33, %34, %35"
#define CRUMB_SUM_NAMES_64                                                        \
  CRUMB_SUM_NAMES_36                                                              \
  ", %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, " \
  "%51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define CRUMB_SUM_NAMES_68 CRUMB_SUM_NAMES_64 ", %64, %65, %66, %67"

#define CRUMB_4_SUMS(how, d, i) how(d[i]), how(d[i + 1]), how(d[i + 2]), how(d[i + 3])
#define CRUMB_16_SUMS(how, d, i)                                                     \
  CRUMB_4_SUMS(how, d, i), CRUMB_4_SUMS(how, d, i + 4), CRUMB_4_SUMS(how, d, i + 8), \
      CRUMB_4_SUMS(how, d, i + 12)
#define CRUMB_SUMS_32(how, d) CRUMB_16_SUMS(how, d, 0), CRUMB_16_SUMS(how, d, 16)
#define CRUMB_SUMS_36(how, d) CRUMB_SUMS_32(how, d), CRUMB_4_SUMS(how, d, 32)
#define CRUMB_SUMS_64(how, d) \
  CRUMB_SUMS_32(how, d), CRUMB_16_SUMS(how, d, 32), CRUMB_16_SUMS(how, d, 48)
#define CRUMB_SUMS_68(how, d) CRUMB_SUMS_64(how, d), CRUMB_4_SUMS(how, d, 64)

// d[64 x kColumns] = A[64 x 16] x B[16 x kColumns] (+ d, if `accumulate` is not 0), fp16 or bf16
// into f32. A warp has 16 rows of A and of d, in the layout of mma.m16n8k16 repeated over columns.
// `b` is a descriptor; kTransposeB: 0 if the 16 elements of a column are contiguous, 1 if those of
// a row are.
template <int kColumns, typename Element>
struct Wgmma;

// The last seven are the numbers of the operands after `sums` sums.
#define CRUMB_WGMMA(columns, sums, a0, a1, a2, a3, desc, more, transpose, type)                    \
  template <typename Element>                                                                      \
  struct Wgmma<columns, Element> {                                                                 \
    template <int kTransposeB>                                                                     \
    static __device__ __forceinline__ void Run(float (&d)[sums],                                   \
                                               const uint32_t (&a)[4],                             \
                                               uint64_t b,                                         \
                                               int accumulate) {                                   \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #more                                      \
                   ", 0;\nwgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.%" #type ".%" #type \
                   " {" CRUMB_SUM_NAMES_##sums "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3           \
                                               "}, %" #desc ", p, 1, 1, %" #transpose ";\n}"       \
                   : CRUMB_SUMS_##sums("+f", d)                                                    \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate),          \
                     "n"(kTransposeB), "C"(WgmmaElement<Element>::kName));                         \
    }                                                                                              \
  }
CRUMB_WGMMA(64, 32, 32, 33, 34, 35, 36, 37, 38, 39);
CRUMB_WGMMA(72, 36, 36, 37, 38, 39, 40, 41, 42, 43);
CRUMB_WGMMA(128, 64, 64, 65, 66, 67, 68, 69, 70, 71);
CRUMB_WGMMA(136, 68, 68, 69, 70, 71, 72, 73, 74, 75);
#undef CRUMB_WGMMA

// The same with A in shared memory too: 16 contiguous elements a row.
template <typename Element>
__device__ __forceinline__ void WgmmaShared64(float (&d)[32],
                                              uint64_t a,
                                              uint64_t b,
                                              int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.%35.%35 {" CRUMB_SUM_NAMES_32
      "}, %32, %33, p, 1, 1, 0, 0;\n}"
      : CRUMB_SUMS_32("+f", d)
      : "l"(a), "l"(b), "r"(accumulate), "C"(WgmmaElement<Element>::kName));
}

// The same of 32 unsigned bytes a row of A and signed ones a column of B, into integers; exact. The
// bytes of a column are contiguous.
template <int kColumns>
struct WgmmaU8S8;

#define CRUMB_WGMMA_U8S8(columns, sums, a0, a1, a2, a3, desc, more)                          \
  template <>                                                                                \
  struct WgmmaU8S8<columns> {                                                                \
    static __device__ __forceinline__ void Run(int (&d)[sums],                               \
                                               const uint32_t (&a)[4],                       \
                                               uint64_t b,                                   \
                                               int accumulate) {                             \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #more                                \
                   ", 0;\nwgmma.mma_async.sync.aligned.m64n" #columns                        \
                   "k32.s32.u8.s8 {" CRUMB_SUM_NAMES_##sums "}, {%" #a0 ", %" #a1 ", %" #a2  \
                                                            ", %" #a3 "}, %" #desc ", p;\n}" \
                   : CRUMB_SUMS_##sums("+r", d)                                              \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));   \
    }                                                                                        \
  }
CRUMB_WGMMA_U8S8(64, 32, 32, 33, 34, 35, 36, 37);
CRUMB_WGMMA_U8S8(128, 64, 64, 65, 66, 67, 68, 69);
#undef CRUMB_WGMMA_U8S8

#undef CRUMB_SUM_NAMES_32
#undef CRUMB_SUM_NAMES_36
#undef CRUMB_SUM_NAMES_64
#undef CRUMB_SUM_NAMES_68
#undef CRUMB_SUMS_32
#undef CRUMB_SUMS_36
#undef CRUMB_SUMS_64
#undef CRUMB_SUMS_68
#undef CRUMB_4_SUMS
#undef CRUMB_16_SUMS

// B in shared memory without swizzle: cores of 128 contiguous bytes, 8 columns of 8 k (of bytes, 16
// k); `k_stride` bytes from a core to the next of more k, `column_stride` to the next of 8 more
// columns. All multiples of 16.
__device__ __forceinline__ uint64_t WgmmaDescriptor(const void* b,
                                                    uint32_t k_stride,
                                                    uint32_t column_stride) {
  return static_cast<uint64_t>((SharedAddress(b) & 0x3ffffu) >> 4) |
         (static_cast<uint64_t>(k_stride >> 4) << 16) |
         (static_cast<uint64_t>(column_stride >> 4) << 32);
}

// B in blocks of 128-byte rows whose chunks of 16 bytes are swizzled: chunk c of row r is at place
// c ^ (r % 8), eight rows aligned to 1024 bytes. Rows are columns of B, or, transposed, its k: then
// 64 more columns are 8192 bytes further on. `b` may be moved by 32 bytes in a row, for 16 more k.
__device__ __forceinline__ uint64_t SwizzledDescriptor(const void* b) {
  constexpr uint64_t kLayout = uint64_t{1} << 62;
  constexpr uint64_t kStrides = (uint64_t{1024 >> 4} << 32) | (uint64_t{8192 >> 4} << 16);
  return static_cast<uint64_t>((SharedAddress(b) & 0x3ffffu) >> 4) | kStrides | kLayout;
}

// Before the first of a batch of products: registers and shared memory written so far are seen.
__device__ __forceinline__ void WgmmaFence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void WgmmaCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until all committed products of this warpgroup are done.
__device__ __forceinline__ void WgmmaWaitAll() {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}
// Until all but the last kPending batches of this warpgroup are done.
template <int kPending>
__device__ __forceinline__ void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Moves registers from one warpgroup of a block to others; all warps of the warpgroup call it.
template <int kCount>
__device__ __forceinline__ void ShrinkRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void GrowRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
// Keeps the compiler from moving accesses of these registers across a wait.
template <int kCount>
__device__ __forceinline__ void WgmmaHold(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    asm volatile("" : "+f"(registers[i])::"memory");
  }
}
template <int kCount>
__device__ __forceinline__ void WgmmaHold(int (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    asm volatile("" : "+r"(registers[i])::"memory");
  }
}

}  // namespace crumb::gpu
