// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>

#include <cmath>
#include <cstdio>
#include <numeric>
#include <random>

#include "bench/gpu/codec_pages.h"
#include "bench/gpu/gpu_timer.h"

namespace crumb::bench {
namespace {

// About normal: the sum of four bytes of a hash.
__device__ float Random(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdull;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ull;
  const auto bits = static_cast<uint32_t>(x >> 32);
  const uint32_t sum = (bits & 255) + (bits >> 8 & 255) + (bits >> 16 & 255) + (bits >> 24);
  return (static_cast<float>(sum) - 510) / 148;
}

__global__ void FillRows(__nv_bfloat16* rows, size_t count) {
  const size_t stride = size_t{gridDim.x} * blockDim.x;
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    rows[i] = __float2bfloat16_rn(Random(i));
  }
}

// One head's numbers, for all heads: speed does not depend on them.
struct HeadNumbers {
  HeadNumbers(uint32_t dim, CodecId codec) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    rotation.resize(size_t{dim} * dim);
    feedback.resize(size_t{dim} * dim);
    mean.resize(dim);
    for (float& x : rotation) {
      x = normal(random) / std::sqrt(static_cast<float>(dim));
    }
    for (size_t i = 0; i < dim; ++i) {
      mean[i] = normal(random);
      for (size_t j = i; j < dim; ++j) {
        feedback[i * dim + j] = i == j ? 1.0f : 0.05f * normal(random);
      }
    }
    parameters.key_dim = parameters.value_dim = dim;
    parameters.codec = codec;
    parameters.key_rotation = parameters.value_rotation = rotation.data();
    parameters.key_mean = mean.data();
    parameters.key_feedback = HasFeedback(codec) ? feedback.data() : nullptr;
    parameters.query_mean = mean.data();
    parameters.key_clip = 0.96f;
    parameters.value_clip = 0.92f;
    parameters.values_by_deviation = codec == CodecId::kOscarInt2Lm;
  }
  std::vector<float> rotation;
  std::vector<float> feedback;
  std::vector<float> mean;
  HeadParameters parameters;
};

constexpr size_t kRowsBytes = size_t{64} << 20;
constexpr uint32_t kMaxSequences = 128;

template <typename T>
T* Upload(const std::vector<T>& values) {
  T* data = nullptr;
  CheckCuda(cudaMalloc(&data, values.size() * sizeof(T)), "allocating");
  CheckCuda(cudaMemcpy(data, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
            "uploading");
  return data;
}

}  // namespace

CodecPages::CodecPages(const Geometry& geometry, CodecId codec, uint32_t num_pages)
    : geometry_(geometry), num_pages_(num_pages) {
  const HeadNumbers numbers(geometry.key_dim, codec);
  const std::vector<HeadParameters> heads(geometry.NumHeadBlocks(), numbers.parameters);
  auto profile = DeviceProfile::Create(geometry, heads);
  if (!profile.ok()) {
    std::fprintf(stderr, "%s\n", std::string(profile.status().message()).c_str());
    std::exit(1);
  }
  profile_ = *std::move(profile);
  const size_t bf16_bytes = geometry.PageBytes(PageEncoding::kBf16);
  const size_t int2_bytes = geometry.PageBytes(PageEncoding::kInt2);
  CheckCuda(cudaMalloc(&bf16_, num_pages * bf16_bytes), "allocating BF16 pages");
  CheckCuda(cudaMalloc(&int2_, num_pages * int2_bytes), "allocating INT2 pages");
  FillRows<<<2048, 256>>>(reinterpret_cast<__nv_bfloat16*>(bf16_), num_pages * bf16_bytes / 2);
  std::vector<std::byte*> tables;
  for (uint32_t page = 0; page < num_pages; ++page) {
    tables.push_back(bf16_ + page * bf16_bytes);
  }
  for (uint32_t page = 0; page < num_pages; ++page) {
    tables.push_back(int2_ + page * int2_bytes);
  }
  tables_ = Upload(tables);
  std::vector<std::byte*> layers;
  for (uint32_t layer = 0; layer < geometry.num_layers; ++layer) {
    layers.push_back(bf16_ + geometry.HeadBlockOffset(PageEncoding::kBf16, layer, 0));
  }
  layers_ = Upload(layers);
  std::vector<int32_t> blocks(num_pages);
  std::iota(blocks.begin(), blocks.end(), 0);
  block_table_ = Upload(blocks);
  checksums_ = Upload(std::vector<uint32_t>(size_t{num_pages} * geometry.num_kv_heads));
  rows_ = Upload(std::vector<std::byte>(kRowsBytes));
  FillRows<<<2048, 256>>>(reinterpret_cast<__nv_bfloat16*>(rows_), kRowsBytes / 2);
  slots_ = Upload(std::vector<uint32_t>(kMaxSequences, 5));
  CheckCuda(cudaMalloc(&finding_, sizeof(uint64_t)), "allocating a finding");
  CheckCuda(cudaMemset(finding_, 0, sizeof(uint64_t)), "clearing a finding");
  CheckCuda(cudaDeviceSynchronize(), "filling pages");
}

CodecPages::~CodecPages() {
  cudaFree(bf16_);
  cudaFree(int2_);
  cudaFree(tables_);
  cudaFree(layers_);
  cudaFree(block_table_);
  cudaFree(checksums_);
  cudaFree(rows_);
  cudaFree(slots_);
  cudaFree(finding_);
}

DemotePagesParams CodecPages::Demotion() const {
  DemotePagesParams params;
  params.heads = heads();
  params.num_pages = num_pages_;
  params.num_layers = geometry_.num_layers;
  params.num_heads = geometry_.num_kv_heads;
  params.keys = {tables_, 0, geometry_.HeadBlockBytes(PageEncoding::kBf16),
                 geometry_.HeadRangeBytes(PageEncoding::kBf16), size_t{2} * geometry_.key_dim};
  params.values = params.keys;
  params.values.offset = geometry_.Bf16Block().value_offset();
  params.int2 = {tables_ + num_pages_, 0, geometry_.HeadBlockBytes(PageEncoding::kInt2),
                 geometry_.HeadRangeBytes(PageEncoding::kInt2)};
  params.finding = finding_;
  return params;
}

ExpandPagesParams CodecPages::Expansion() const {
  ExpandPagesParams params;
  params.heads = heads();
  params.num_pages = num_pages_;
  params.num_layers = geometry_.num_layers;
  params.num_heads = geometry_.num_kv_heads;
  params.int2 = {tables_ + num_pages_, 0, geometry_.HeadBlockBytes(PageEncoding::kInt2),
                 geometry_.HeadRangeBytes(PageEncoding::kInt2)};
  params.keys = {layers_, 0, geometry_.PageBytes(PageEncoding::kBf16),
                 size_t{2} * geometry_.key_dim, geometry_.HeadRangeBytes(PageEncoding::kBf16)};
  params.values = params.keys;
  params.values.offset = geometry_.Bf16Block().value_offset();
  params.block_table = block_table_;
  params.block_tokens = kPageTokens;
  params.num_blocks = num_pages_;
  params.num_tokens = num_pages_ * kPageTokens;
  params.rows_left_out = finding_;
  return params;
}

ChecksumPagesParams CodecPages::Checksum() const {
  const size_t range = geometry_.HeadRangeBytes(PageEncoding::kInt2);
  return {.num_pages = num_pages_,
          .num_ranges = geometry_.num_kv_heads,
          .pages = tables_ + num_pages_,
          .range_stride = range,
          .range_bytes = range,
          .checksums = checksums_};
}

AppendRowsParams CodecPages::Append(uint32_t layer, uint32_t num_sequences) const {
  constexpr uint32_t kGroup = 4;
  const size_t row = size_t{2} * geometry_.key_dim;
  const uint32_t queries = kGroup * geometry_.num_kv_heads;
  const size_t token = row * (queries + 2 * geometry_.num_kv_heads);
  AppendRowsParams params;
  params.heads = heads();
  params.layer = layer;
  params.num_kv_heads = geometry_.num_kv_heads;
  params.num_query_heads = queries;
  params.num_tokens = num_sequences;
  params.queries = {rows_, token};
  params.keys = {rows_ + queries * row, token};
  params.values = {rows_ + (queries + geometry_.num_kv_heads) * row, token};
  params.rotated_queries = rows_ + kRowsBytes / 2;
  params.pages = tables_;
  params.num_sequences = num_sequences;
  params.stride = 1;
  params.block_offset = geometry_.HeadBlockOffset(PageEncoding::kBf16, layer, 0);
  params.head_stride = geometry_.HeadRangeBytes(PageEncoding::kBf16);
  params.slots = slots_;
  params.tokens_left_out = finding_;
  return params;
}

PrefillAttentionParams CodecPages::Prefill(uint32_t layer, uint32_t num_queries) const {
  PrefillAttentionParams params;
  params.num_queries = num_queries;
  params.num_query_heads = 4 * geometry_.num_kv_heads;
  params.num_kv_heads = geometry_.num_kv_heads;
  params.head_dim = geometry_.key_dim;
  params.scale = 1 / std::sqrt(static_cast<float>(geometry_.key_dim));
  params.queries = rows_;
  params.out = rows_ + kRowsBytes / 2;
  params.history = {tables_ + num_pages_, num_pages_,
                    geometry_.HeadBlockOffset(PageEncoding::kInt2, layer, 0),
                    geometry_.HeadRangeBytes(PageEncoding::kInt2)};
  params.history_pages = num_pages_;
  params.windows = {tables_, num_pages_, geometry_.HeadBlockOffset(PageEncoding::kBf16, layer, 0),
                    geometry_.HeadRangeBytes(PageEncoding::kBf16)};
  params.window_tokens = num_queries + kPageTokens;
  return params;
}

double CodecPages::Bf16Bytes() const {
  return static_cast<double>(num_pages_) *
         static_cast<double>(geometry_.PageBytes(PageEncoding::kBf16));
}

double CodecPages::Int2Bytes() const {
  return static_cast<double>(num_pages_) *
         static_cast<double>(geometry_.PageBytes(PageEncoding::kInt2));
}

}  // namespace crumb::bench
