// SPDX-License-Identifier: Apache-2.0
#include "crumb/gpu_page_pool.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

#include "client/gpu/gpu_page_pool_impl.h"
#include "client/gpu/output_rotation.h"
#include "proto/base/check.h"
#include "proto/base/status_macros.h"
#include "proto/page/check_heads.h"

namespace crumb {
namespace {

absl::Status BadOption(const char* option, const std::string& value, const std::string& limit) {
  return absl::InvalidArgumentError(
      absl::StrCat("GpuPagePool::Options::", option, " is ", value, "; it must be ", limit));
}

absl::Status CheckOptions(const GpuPagePool::Options& options) {
  CRUMB_RETURN_IF_ERROR(CheckHeads("GpuPagePool::Options::heads", options.heads,
                                   options.profile->geometry().num_kv_heads));
  if (!HasDemotionKernels(*options.profile)) {
    return absl::UnimplementedError(absl::StrCat(
        "GpuPagePool::Options::profile, of ", std::string(CodecName(options.profile->codec())),
        ", has key_ranges of its own, where the GPU cuts ranges as its kernels have it: use a "
        "Sequence of the CPU, or fit the profile with --key-ranges codec"));
  }
  if (options.int2_pages == 0 || options.bf16_pages == 0) {
    return BadOption(options.int2_pages == 0 ? "int2_pages" : "bf16_pages", "0",
                     "1 or more; a sequence needs pages of both kinds");
  }
  return absl::OkStatus();
}

Geometry RankGeometry(const GpuPagePool::Options& options) {
  Geometry geometry = options.profile->geometry();
  geometry.num_kv_heads = options.heads.count;
  return geometry;
}

std::vector<HeadParameters> RankHeads(const GpuPagePool::Options& options) {
  std::vector<HeadParameters> heads;
  for (uint32_t layer = 0; layer < options.profile->geometry().num_layers; ++layer) {
    for (uint32_t head = 0; head < options.heads.count; ++head) {
      heads.push_back(options.profile->head(layer, options.heads.first + head));
    }
  }
  return heads;
}

}  // namespace

GpuPagePool::Impl::Impl(Options options)
    : options_(std::move(options)), geometry_(RankGeometry(options_)) {}

absl::StatusOr<std::unique_ptr<GpuPagePool::Impl>> GpuPagePool::Impl::Create(Options options) {
  std::unique_ptr<Impl> pool(new Impl(std::move(options)));
  const ScopedGpu current(pool->options_.gpu);
  CRUMB_RETURN_IF_ERROR(current.status());
  const std::vector<HeadParameters> heads = RankHeads(pool->options_);
  CRUMB_ASSIGN_OR_RETURN(pool->profile_, DeviceProfile::Create(pool->geometry_, heads));
  if (!pool->options_.keeps_outputs_rotated) {
    CRUMB_ASSIGN_OR_RETURN(pool->output_profile_, CreateOutputProfile(pool->geometry_, heads));
  }
  CRUMB_RETURN_IF_ERROR(pool->Allocate());
  CRUMB_ASSIGN_OR_RETURN(pool->demoter_,
                         PageDemoter::Create({.geometry = pool->geometry_,
                                              .heads = pool->options_.heads,
                                              .device_heads = pool->profile_->heads()}));
  return pool;
}

absl::Status GpuPagePool::Impl::Allocate() {
  const auto allocate = [&](PageEncoding encoding, uint32_t num_pages,
                            std::unique_ptr<OwnGpuMemory>* memory,
                            std::unique_ptr<PageShelf>* shelf) {
    const size_t page_bytes = geometry_.PageBytes(encoding);
    auto allocated = OwnGpuMemory::Create(num_pages * page_bytes);
    if (!allocated.ok()) {
      return absl::Status(
          allocated.status().code(),
          absl::StrCat("a pool of ", num_pages, " pages of ", page_bytes, " bytes on GPU ",
                       options_.gpu, ": ", allocated.status().message(),
                       "; lower GpuPagePool::Options::",
                       encoding == PageEncoding::kInt2 ? "int2_pages" : "bf16_pages"));
    }
    *memory = *std::move(allocated);
    *shelf = std::make_unique<PageShelf>((*memory)->data(), page_bytes, num_pages);
    return absl::OkStatus();
  };
  CRUMB_RETURN_IF_ERROR(allocate(PageEncoding::kInt2, options_.int2_pages, &int2_memory_, &int2_));
  return allocate(PageEncoding::kBf16, options_.bf16_pages, &bf16_memory_, &bf16_);
}

uint64_t GpuPagePool::Impl::NextSequenceId() {
  absl::MutexLock lock(&mutex_);
  return ++last_sequence_id_;
}

absl::Status GpuPagePool::Impl::Take(PageEncoding encoding, std::span<std::byte*> pages) {
  absl::MutexLock lock(&mutex_);
  PageShelf& from = shelf(encoding);
  if (from.Take(pages)) {
    return absl::OkStatus();
  }
  const bool is_int2 = encoding == PageEncoding::kInt2;
  return absl::ResourceExhaustedError(absl::StrCat(
      "the sequence needs ", pages.size(), " more ", is_int2 ? "INT2" : "BF16", " pages of ",
      from.page_bytes(), " bytes, the pool has ", from.num_free(), " free of ", from.num_pages(),
      "; end a sequence, or raise GpuPagePool::Options::", is_int2 ? "int2_pages" : "bf16_pages"));
}

void GpuPagePool::Impl::Return(PageEncoding encoding, std::byte* page) {
  absl::MutexLock lock(&mutex_);
  PageShelf& to = shelf(encoding);
  if (to.num_spoiled() > 0 && to.IsSpoiled(page)) {
    std::erase_if(spoiled_, [page](const auto& spoiled) { return spoiled.int2 == page; });
  }
  to.Return(page);
}

GpuPagePool::Usage GpuPagePool::Impl::usage(PageEncoding encoding) const {
  absl::MutexLock lock(&mutex_);
  const PageShelf& of = encoding == PageEncoding::kInt2 ? *int2_ : *bf16_;
  return {of.num_pages(), of.num_free(), of.page_bytes()};
}

absl::Status GpuPagePool::Impl::CheckPages(const GpuPageTable& pages) {
  std::vector<PageDemoter::Spoiled> fresh = demoter_->TakeSpoiled();
  absl::MutexLock lock(&mutex_);
  for (PageDemoter::Spoiled& spoiled : fresh) {
    int2_->Spoil(spoiled.int2);
    if (int2_->IsSpoiled(spoiled.int2)) {
      spoiled_.push_back(std::move(spoiled));
    }
  }
  absl::Status status;
  if (int2_->num_spoiled() > 0) {
    pages.ForEachOwnInt2([&](const std::byte* page) ABSL_NO_THREAD_SAFETY_ANALYSIS {
      for (const PageDemoter::Spoiled& spoiled : spoiled_) {
        status.Update(spoiled.int2 == page ? spoiled.why : absl::OkStatus());
      }
    });
  }
  return status;
}

uint32_t GpuPagePool::Bf16PagesFor(const Windows& windows,
                                   uint32_t num_sequences,
                                   uint32_t step_tokens) {
  // Of a sequence: its sink, the recent window, up to a page that is not full before it and one
  // after it. A step's tokens come on top before what leaves the windows for them is given up.
  const uint32_t pages_a_sequence = (windows.sink_tokens + windows.recent_tokens) / kPageTokens + 2;
  return num_sequences * pages_a_sequence + step_tokens / kPageTokens + 1;
}

absl::StatusOr<std::unique_ptr<GpuPagePool>> GpuPagePool::Create(Options options) {
  if (options.profile == nullptr) {
    return BadOption("profile", "null", "a loaded profile");
  }
  options.heads = options.heads.Resolve(options.profile->geometry().num_kv_heads);
  CRUMB_RETURN_IF_ERROR(CheckOptions(options));
  CRUMB_ASSIGN_OR_RETURN(std::unique_ptr<Impl> impl, Impl::Create(std::move(options)));
  return std::unique_ptr<GpuPagePool>(new GpuPagePool(std::move(impl)));
}

GpuPagePool::GpuPagePool(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

GpuPagePool::~GpuPagePool() {
  for (const PageEncoding encoding : {PageEncoding::kInt2, PageEncoding::kBf16}) {
    const Usage left = usage(encoding);
    CRUMB_CHECK(left.num_free == left.num_pages, "a pool outlives its sequences");
  }
}

const Profile& GpuPagePool::profile() const {
  return *impl_->options().profile;
}
HeadRange GpuPagePool::heads() const {
  return impl_->options().heads;
}
int GpuPagePool::gpu() const {
  return impl_->options().gpu;
}
GpuPagePool::Usage GpuPagePool::usage(PageEncoding encoding) const {
  return impl_->usage(encoding);
}

}  // namespace crumb
