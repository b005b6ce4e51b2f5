// SPDX-License-Identifier: Apache-2.0
//
// Decode over a long cache: split attention over INT2 pages beside the same attention over BF16
// keys and values, one token of one layer: 32,768 tokens, 32 query heads, 8 KV heads, head_dim 128,
// one thread, two, and so on up to the number of processors or KV heads. Several layers' caches are
// read in turn, more than any processor's cache holds. Both caches are paged, 64 tokens a page, and
// pages lie in random order, in huge pages where Linux gives them. All times are medians of turns
// in one run; all threads are always at the same kind of cache, and so share memory as the threads
// of one engine do.
//
// `flat` scores are spread as those of random rows are, so that no token has much of the
// probability; `peaked` ones give a few tokens most of it, which costs second digits.
#include <benchmark/benchmark.h>
#include <sys/mman.h>

#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"

#include "bench/cuda/bf16_attention.h"
#include "bench/support/figure.h"
#include "bench/support/thread_clock.h"
#include "crumb/cuda/split_attention.h"
#include "proto/base/float16.h"
#include "proto/base/huge_page.h"
#include "proto/page/page_format.h"

namespace crumb::bench {
namespace {

constexpr size_t kTokens = 32768;
constexpr size_t kPages = kTokens / kPageTokens;
constexpr size_t kKvHeads = 8;
constexpr uint32_t kGroup = 4;
constexpr uint32_t kDim = 128;
constexpr size_t kInt2Layers = 8;  // 151 MB
constexpr size_t kBf16Layers = 2;  // 268 MB
constexpr Int2HeadBlock kBlock{kDim, kDim};
constexpr size_t kBf16Block = size_t{2} * kPageTokens * kDim;  // Elements.
constexpr size_t kBytesOfHead = kPages * kBlock.bytes();
constexpr size_t kRounds = 31;
const float kScale = 1 / std::sqrt(static_cast<float>(kDim));

double Seconds(const std::function<void()>& call) {
  const double start = ThreadSeconds();
  call();
  return ThreadSeconds() - start;
}

// Memory in huge pages where Linux gives them, as crumbd's arena is.
template <typename T>
struct HugePages {
  using value_type = T;
  HugePages() = default;
  template <typename U>
  explicit HugePages(const HugePages<U>& /*other*/) {}
  T* allocate(size_t count) {
    const size_t bytes = (count * sizeof(T) + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
    void* memory = std::aligned_alloc(kHugePageBytes, bytes);
    madvise(memory, bytes, MADV_HUGEPAGE);
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, size_t /*count*/) { std::free(memory); }
  friend bool operator==(const HugePages& /*a*/, const HugePages& /*b*/) { return true; }
};

struct Caches {
  std::vector<std::byte, HugePages<std::byte>> int2;
  std::vector<const std::byte*> pages;  // [layer][kv_head][page], in random order of memory.
  std::vector<BFloat16, HugePages<BFloat16>> bf16;
  std::vector<const BFloat16*> bf16_pages;  // As pages: keys [64, 128], then values.
  std::vector<float> queries;               // [32, 128]
  std::vector<float> peaked_queries;
  std::vector<float> out;
  std::vector<std::byte, HugePages<std::byte>> copy;
  std::vector<BFloat16> newest;  // One row: the query's own.
};

Caches MakeCaches() {
  Caches caches;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const size_t num_blocks = kInt2Layers * kKvHeads * kPages;
  caches.int2.resize(num_blocks * kBlock.bytes() + 64);
  auto* base = caches.int2.data() + (64 - reinterpret_cast<uintptr_t>(caches.int2.data()) % 64);
  std::vector<uint32_t> words(1 << 16);
  for (uint32_t& word : words) {
    word = static_cast<uint32_t>(random());
  }
  for (size_t block = 0; block < num_blocks; ++block) {
    std::byte* at = base + block * kBlock.bytes();
    std::memcpy(at, words.data() + random() % 60000, kBlock.key_meta_offset());
    for (size_t row = 0; row < size_t{2} * kPageTokens; ++row) {
      // Levels of a row with unit deviation: scale 0.9, minimum -1.35, a little different each.
      const float scale = 0.9f + static_cast<float>(random() % 64) / 400;
      const uint16_t meta[2] = {Float16::FromFloat(scale).bits,
                                Float16::FromFloat(-1.5f * scale).bits};
      std::memcpy(at + kBlock.key_meta_offset() + 4 * row, meta, 4);
    }
    caches.pages.push_back(at);
  }
  std::shuffle(caches.pages.begin(), caches.pages.end(), random);
  std::vector<BFloat16> rows(1 << 16);
  for (BFloat16& value : rows) {
    value = BFloat16::FromFloat(normal(random));
  }
  caches.bf16.resize(kBf16Layers * kKvHeads * 2 * kTokens * kDim);
  for (size_t i = 0; i < caches.bf16.size(); i += kDim) {
    std::copy_n(rows.begin() + static_cast<ptrdiff_t>(random() % 65000), kDim,
                caches.bf16.begin() + static_cast<ptrdiff_t>(i));
  }
  for (size_t i = 0; i < caches.bf16.size(); i += kBf16Block) {
    caches.bf16_pages.push_back(caches.bf16.data() + i);
  }
  std::shuffle(caches.bf16_pages.begin(), caches.bf16_pages.end(), random);
  for (size_t i = 0; i < kKvHeads * kGroup * kDim; ++i) {
    caches.queries.push_back(normal(random));
    caches.peaked_queries.push_back(3.5f * caches.queries.back());
  }
  caches.copy.resize(caches.int2.size());
  caches.out.resize(caches.queries.size());
  caches.newest.assign(rows.begin(), rows.begin() + kDim);
  return caches;
}

void AttendInt2(
    Caches& caches, const std::vector<float>& queries, size_t layer, size_t kv_head, CpuPath path) {
  const Bf16Rows newest{caches.newest.data(), caches.newest.data(), 1};
  const SplitAttentionParams params{
      .key_dim = kDim,
      .value_dim = kDim,
      .num_queries = 1,
      .group = kGroup,
      .scale = kScale,
      .queries = queries.data() + kv_head * kGroup * kDim,
      .history = std::span(caches.pages).subspan((layer * kKvHeads + kv_head) * kPages, kPages),
      .windows = {&newest, 1},
      .out = caches.out.data() + kv_head * kGroup * kDim};
  if (!SplitAttention(params, path).ok()) {
    std::abort();
  }
}

void AttendBf16(Caches& caches, size_t layer, size_t kv_head, CpuPath path) {
  const BFloat16* const* pages = caches.bf16_pages.data() + (layer * kKvHeads + kv_head) * kPages;
  const float* queries = caches.queries.data() + kv_head * kGroup * kDim;
  float* out = caches.out.data() + kv_head * kGroup * kDim;
  if (path == CpuPath::kAvx512 && HasAvx512Bf16()) {
    Bf16AttentionAvx512(
        {.queries = queries, .pages = pages, .num_pages = kPages, .scale = kScale, .out = out});
    return;
  }
  std::vector<Bf16Rows> windows;
  for (size_t page = 0; page < kPages; ++page) {
    windows.push_back({pages[page], pages[page] + kBf16Block / 2, kPageTokens});
  }
  const SplitAttentionParams params{.key_dim = kDim,
                                    .value_dim = kDim,
                                    .num_queries = 1,
                                    .group = kGroup,
                                    .scale = kScale,
                                    .queries = queries,
                                    .history = {},
                                    .windows = windows,
                                    .out = out};
  if (!SplitAttention(params, path).ok()) {
    std::abort();
  }
}

// Seconds of the thread's own time for one KV head, one entry a call. One Times a thread; the
// threads' rates are added.
struct Times {
  std::vector<double> flat;
  std::vector<double> peaked;
  std::vector<double> bf16;
  std::vector<double> copy;
};

// One thread's rounds: KV heads `thread`, `thread` + num_threads, ...
void MeasureThread(Caches& caches,
                   size_t thread,
                   size_t num_threads,
                   CpuPath path,
                   std::barrier<>& all,
                   Times& times) {
  const auto measure = [&all](std::vector<double>& kind, const std::function<void()>& call) {
    all.arrive_and_wait();
    kind.push_back(Seconds(call));
  };
  for (size_t round = 0; round < kRounds; ++round) {
    for (size_t head = thread; head < kKvHeads; head += num_threads) {
      const size_t layer = round % kInt2Layers;
      measure(times.flat, [&] { AttendInt2(caches, caches.queries, layer, head, path); });
      measure(times.bf16, [&] { AttendBf16(caches, round % kBf16Layers, head, path); });
      measure(times.peaked, [&] {
        AttendInt2(caches, caches.peaked_queries, (layer + 4) % kInt2Layers, head, path);
      });
      // As many bytes as the head's INT2 pages, from one place in memory to another.
      const size_t part = (layer * kKvHeads + head) * kBytesOfHead;
      measure(times.copy, [&] {
        std::memcpy(caches.copy.data() + part, caches.int2.data() + part, kBytesOfHead);
      });
    }
  }
}

double MedianOf(const std::vector<Times>& threads, std::vector<double> Times::*kind) {
  std::vector<double> all;
  for (const Times& times : threads) {
    all.insert(all.end(), (times.*kind).begin(), (times.*kind).end());
  }
  std::sort(all.begin(), all.end());
  return all[all.size() / 2];
}

void Measure(Caches& caches, CpuPath path, size_t num_threads) {
  std::vector<Times> times(num_threads);
  std::barrier<> all(static_cast<ptrdiff_t>(num_threads));
  std::vector<std::thread> threads;
  for (size_t thread = 1; thread < num_threads; ++thread) {
    threads.emplace_back(
        [&, thread] { MeasureThread(caches, thread, num_threads, path, all, times[thread]); });
  }
  MeasureThread(caches, 0, num_threads, path, all, times[0]);
  for (std::thread& thread : threads) {
    thread.join();
  }
  const auto heads_per_s = [&](std::vector<double> Times::*kind) {
    return static_cast<double>(num_threads) / MedianOf(times, kind);
  };
  const double bf16 = heads_per_s(&Times::bf16) / kKvHeads;
  const double copied = heads_per_s(&Times::copy) * kBytesOfHead / 1e9;
  for (const auto& [kind, member] :
       {std::pair{"flat", &Times::flat}, std::pair{"peaked", &Times::peaked}}) {
    const double heads = heads_per_s(member);
    const std::string name =
        absl::StrCat("split_attention/", kind, "/", std::string(CpuPathName(path)).c_str(),
                     "/threads:", num_threads);
    Register(name + "/tokens", {.value = heads / kKvHeads,
                                .limit = bf16,
                                .target = 4 * bf16,
                                .unit = "tokens/s a layer",
                                .limit_name = "the same attention over BF16"});
    Register(name + "/int2_bytes", {.value = heads * kBytesOfHead / 1e9,
                                    .limit = copied,
                                    .unit = "GB/s",
                                    .limit_name = "memcpy of the same bytes"});
  }
}

}  // namespace
}  // namespace crumb::bench

int main(int argc, char** argv) {
  using crumb::CpuPath;
  crumb::bench::Caches caches = crumb::bench::MakeCaches();
  // Powers of two, so that all threads have as many KV heads.
  const size_t most_threads =
      std::clamp<size_t>(std::thread::hardware_concurrency(), 1, crumb::bench::kKvHeads);
  for (const CpuPath path : {CpuPath::kAvx512, CpuPath::kAvx2}) {
    for (size_t num_threads = 1; num_threads <= most_threads; num_threads *= 2) {
      if (crumb::CpuPathAvailable(path)) {
        crumb::bench::Measure(caches, path, num_threads);
      }
    }
  }
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
}
