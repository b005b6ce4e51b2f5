// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "bench/gpu/decode_batch.h"
#include "bench/gpu/gpu_timer.h"
#include "proto/page/page_format.h"

namespace crumb::bench {
namespace {

__device__ uint32_t Hash(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdull;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ull;
  return static_cast<uint32_t>(x >> 32);
}

__global__ void FillRandom(uint32_t* words, size_t count) {
  const size_t stride = size_t{gridDim.x} * blockDim.x;
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    words[i] = Hash(i);
  }
}

// Numbers of about one, two a word.
__global__ void FillBf16(__nv_bfloat162* pairs, size_t count, float deviation) {
  const size_t stride = size_t{gridDim.x} * blockDim.x;
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    const uint32_t bits = Hash(i + (uint64_t{1} << 40));
    const float a = static_cast<float>(bits & 0xffff) / 32768 - 1;
    const float b = static_cast<float>(bits >> 16) / 32768 - 1;
    pairs[i] = __floats2bfloat162_rn(a * 1.7f * deviation, b * 1.7f * deviation);
  }
}

// Scales and minima of every row of `num_blocks` INT2 head blocks.
__global__ void FillMeta(std::byte* blocks, size_t num_blocks, Int2HeadBlock format) {
  const size_t stride = size_t{gridDim.x} * blockDim.x;
  constexpr size_t kRows = size_t{2} * kPageTokens;
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < num_blocks * kRows;
       i += stride) {
    const uint32_t bits = Hash(i + (uint64_t{1} << 41));
    const float scale = 0.2f + 0.8f * static_cast<float>(bits & 0xffff) / 65536;
    const float min = -1.5f * scale * (0.8f + 0.4f * static_cast<float>(bits >> 16) / 65536);
    std::byte* block = blocks + i / kRows * format.bytes();
    reinterpret_cast<__half2*>(block + format.key_meta_offset())[i % kRows] =
        __floats2half2_rn(scale, min);
  }
}

constexpr int kBlocks = 2048;
constexpr int kThreads = 256;

}  // namespace

template <typename T>
T* DecodeBatch::Allocate(size_t count) {
  void* data = nullptr;
  CheckCuda(cudaMalloc(&data, std::max<size_t>(count, 1) * sizeof(T)), "allocating a batch");
  allocations_[num_allocations_++] = data;
  return static_cast<T*>(data);
}

DecodeBatch::DecodeBatch(const BatchShape& shape) : shape_(shape) {
  const Geometry& geometry = shape.geometry;
  const uint32_t pages = shape.history_tokens / kPageTokens;
  const uint32_t shared = shape.shared_tokens / kPageTokens;
  const uint32_t window_pages = (shape.window_tokens + kPageTokens - 1) / kPageTokens;
  const size_t num_int2 = shared + size_t{shape.num_sequences} * (pages - shared);
  const size_t num_bf16 = size_t{shape.num_sequences} * window_pages;
  const size_t int2_bytes = geometry.PageBytes(PageEncoding::kInt2);
  const size_t bf16_bytes = geometry.PageBytes(PageEncoding::kBf16);
  auto* int2 = Allocate<std::byte>(num_int2 * int2_bytes);
  auto* bf16 = Allocate<std::byte>(num_bf16 * bf16_bytes);
  FillRandom<<<kBlocks, kThreads>>>(reinterpret_cast<uint32_t*>(int2), num_int2 * int2_bytes / 4);
  FillMeta<<<kBlocks, kThreads>>>(int2, num_int2 * geometry.NumHeadBlocks(), geometry.Int2Block());
  FillBf16<<<kBlocks, kThreads>>>(reinterpret_cast<__nv_bfloat162*>(bf16),
                                  num_bf16 * bf16_bytes / 4, 0.7f);

  std::mt19937 random(1);
  std::vector<size_t> order(num_int2);
  std::iota(order.begin(), order.end(), size_t{0});
  std::shuffle(order.begin(), order.end(), random);
  std::vector<const std::byte*> history(size_t{shape.num_sequences} * pages);
  std::vector<const std::byte*> windows(num_bf16);
  size_t next = shared;
  for (size_t i = 0; i < history.size(); ++i) {
    const size_t page = i % pages < shared ? order[i % pages] : order[next++];
    history[i] = int2 + page * int2_bytes;
  }
  for (size_t i = 0; i < num_bf16; ++i) {
    windows[i] = bf16 + i * bf16_bytes;
  }
  const auto upload = [&](const auto& values) {
    using Value = typename std::decay_t<decltype(values)>::value_type;
    auto* data = Allocate<Value>(values.size());
    CheckCuda(
        cudaMemcpy(data, values.data(), values.size() * sizeof(Value), cudaMemcpyHostToDevice),
        "uploading a table");
    return data;
  };
  const size_t rows = size_t{shape.num_sequences} * shape.num_query_heads;
  const size_t dim = geometry.key_dim;
  auto* queries = Allocate<std::byte>(rows * dim * 2);
  FillBf16<<<kBlocks, kThreads>>>(reinterpret_cast<__nv_bfloat162*>(queries), rows * dim / 2, 1);
  CheckCuda(cudaDeviceSynchronize(), "filling a batch");

  constexpr size_t kWorkspaceBytes = size_t{64} << 20;
  params_.num_sequences = shape.num_sequences;
  params_.num_query_heads = shape.num_query_heads;
  params_.num_kv_heads = geometry.num_kv_heads;
  params_.head_dim = geometry.key_dim;
  params_.scale = 1 / std::sqrt(static_cast<float>(geometry.key_dim));
  params_.queries = queries;
  params_.out = Allocate<std::byte>(rows * dim * 2);
  params_.lse = Allocate<float>(rows);
  params_.history = {upload(history), pages, 0, geometry.HeadRangeBytes(PageEncoding::kInt2)};
  params_.history_pages = upload(std::vector<uint32_t>(shape.num_sequences, pages));
  params_.windows = {upload(windows), window_pages, 0,
                     geometry.HeadRangeBytes(PageEncoding::kBf16)};
  params_.window_tokens = upload(std::vector<uint32_t>(shape.num_sequences, shape.window_tokens));
  prefix_pages_ = upload(std::vector<uint32_t>(1, shared));
  own_pages_ = upload(std::vector<uint32_t>(shape.num_sequences, pages - shared));
  params_.workspace = Allocate<std::byte>(kWorkspaceBytes);
  params_.workspace_bytes = kWorkspaceBytes;
  CheckCuda(cudaMemset(params_.workspace, 0, kWorkspaceBytes), "clearing the workspace");
}

DecodeBatch::~DecodeBatch() {
  for (int i = 0; i < num_allocations_; ++i) {
    cudaFree(allocations_[i]);
  }
}

SplitDecodeParams DecodeBatch::Params(uint32_t layer) const {
  SplitDecodeParams params = params_;
  params.history.block_offset = shape_.geometry.HeadBlockOffset(PageEncoding::kInt2, layer, 0);
  params.windows.block_offset = shape_.geometry.HeadBlockOffset(PageEncoding::kBf16, layer, 0);
  return params;
}

double DecodeBatch::HistoryBytes() const {
  return static_cast<double>(shape_.num_sequences) * (shape_.history_tokens / kPageTokens) *
         shape_.geometry.num_kv_heads *
         static_cast<double>(shape_.geometry.HeadBlockBytes(PageEncoding::kInt2));
}

double DecodeBatch::WindowBytes() const {
  return static_cast<double>(shape_.num_sequences) * shape_.window_tokens *
         shape_.geometry.num_kv_heads * 2.0 * (shape_.geometry.key_dim + shape_.geometry.value_dim);
}

}  // namespace crumb::bench
