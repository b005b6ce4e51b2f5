// SPDX-License-Identifier: Apache-2.0
#include "crumb/gpu_sequence.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "client/gpu/gpu_sequence_impl.h"
#include "proto/base/check.h"
#include "proto/base/status_macros.h"

namespace crumb {
namespace {

constexpr uint32_t kMaxTokens = 1u << 30;  // Keeps positions and their pages within 32 bits.

// Where the rank's first head begins in an image of all heads of the model.
const std::byte* FirstHead(const std::byte* image, uint32_t first_head, size_t range_bytes) {
  // By numbers: an upload's image may begin before its memory.
  return image == nullptr
             ? nullptr
             : reinterpret_cast<const std::byte*>(  // NOLINT(performance-no-int-to-ptr)
                   reinterpret_cast<uintptr_t>(image) + first_head * range_bytes);
}

}  // namespace

GpuSequence::Impl::Impl(const Options& options)
    : pool_(options.pool->impl()),
      id_(pool_.NextSequenceId()),
      max_tokens_(options.max_tokens),
      pages_({.geometry = pool_.geometry(), .windows = options.pool->profile().windows()}, &pool_) {
}

// Of another rank's heads there are no bytes in the pages, and of another GPU's memory the address
// alone is here: a kernel that reads either is wrong, or ends all work of the process.
absl::Status GpuSequence::Impl::CheckPrefix(const PrefixHandle& prefix,
                                            const GpuUpload* upload) const {
  const GpuPagePool::Options& pool = pool_.options();
  if (prefix.profile_id() != pool.profile->id()) {
    return absl::FailedPreconditionError(
        absl::StrCat("the prefix is of profile ", prefix.profile_id().Short(), ", the pool of ",
                     pool.profile->id().Short(), "; attach the client with the pool's profile"));
  }
  const HeadRange heads = prefix.heads().Resolve(pool.profile->geometry().num_kv_heads);
  if ((pool.heads.Mask() & ~heads.Mask()) != 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the prefix has KV heads ", heads.first, " + ", heads.count, " of each page, the pool ",
        pool.heads.first, " + ", pool.heads.count, "; attach the client with the pool's heads"));
  }
  if (prefix.gpu() >= 0 && prefix.gpu() != pool.gpu) {
    return absl::FailedPreconditionError(
        absl::StrCat("the prefix is of a client on GPU ", prefix.gpu(), ", the pool on GPU ",
                     pool.gpu, "; attach a client with the pool's ClientOptions::gpu"));
  }
  if (upload != nullptr && &upload->prefix() != &prefix) {
    return absl::FailedPreconditionError(
        "the upload is of another prefix than is adopted with it: adopt each with its own");
  }
  return absl::OkStatus();
}

// shared: both with who else adopts the prefix.
absl::Status GpuSequence::Impl::Adopt(std::shared_ptr<PrefixHandle> prefix,
                                      std::shared_ptr<GpuUpload> upload) {
  if (length_ != 0 || step_tokens_ != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("the sequence holds ", length_ + step_tokens_,
                     " tokens already; adopt a prefix before the first step, once"));
  }
  if (prefix == nullptr || prefix->num_pages() == 0) {
    return absl::OkStatus();  // A miss.
  }
  CRUMB_RETURN_IF_ERROR(CheckPrefix(*prefix, upload.get()));
  const uint32_t num_pages = prefix->num_pages();
  if (num_pages > max_tokens_ / kPageTokens) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "the prefix has ", num_pages * uint64_t{kPageTokens}, " tokens, the sequence may have ",
        max_tokens_, "; raise GpuSequence::Options::max_tokens"));
  }
  const auto page_at = [&](uint32_t page, PageEncoding encoding) {
    const std::byte* const image = upload != nullptr ? upload->Page(PageIdx(page), encoding)
                                                     : prefix->GpuPage(PageIdx(page), encoding);
    return FirstHead(image, pool_.options().heads.first, pool_.geometry().HeadRangeBytes(encoding));
  };
  std::vector<GpuPageTable::SharedPage> pages(num_pages);
  for (uint32_t page = 0; page < num_pages; ++page) {
    pages[page] = {.int2 = page_at(page, PageEncoding::kInt2),
                   .bf16 = page_at(page, PageEncoding::kBf16),
                   .has_bf16_elsewhere = prefix->HeadBlock(PageIdx(page), PageEncoding::kBf16, 0,
                                                           pool_.options().heads.first) != nullptr};
  }
  CRUMB_RETURN_IF_ERROR(pages_.Adopt(std::move(pages)));
  prefix_ = std::move(prefix);
  upload_ = std::move(upload);
  length_ = num_pages * kPageTokens;
  return absl::OkStatus();
}

absl::Status GpuSequence::Impl::RetainTail(uint32_t prefix_tokens) {
  if (prefix_tokens % kPageTokens != 0) {
    return absl::InvalidArgumentError(absl::StrCat("prefix_tokens is ", prefix_tokens,
                                                   "; it must be a multiple of ", kPageTokens));
  }
  const uint32_t recent = pool_.options().profile->windows().recent_tokens;
  const uint32_t start = prefix_tokens > recent ? prefix_tokens - recent : 0;
  return pages_.Retain(start / kPageTokens, prefix_tokens / kPageTokens);
}

absl::Status GpuSequence::Impl::Validate() const {
  CRUMB_RETURN_IF_ERROR(ValidatePages());
  if (upload_ != nullptr) {
    return upload_->Validate();  // The prefix's as well.
  }
  return prefix_ == nullptr ? absl::OkStatus() : prefix_->Validate();
}

Sequence::Footprint GpuSequence::Impl::footprint() const {
  const Geometry& rank = pool_.geometry();
  Sequence::Footprint total = pages_.footprint();
  total.bf16_equivalent_bytes = size_t{length_} * rank.num_layers * rank.num_kv_heads *
                                (rank.key_dim + rank.value_dim) * sizeof(uint16_t);
  return total;
}

absl::Status GpuSequence::Impl::BeginStep(uint32_t num_tokens) {
  CRUMB_CHECK(step_tokens_ == 0, "one step at a time");
  if (num_tokens > max_tokens_ - length_) {
    return absl::ResourceExhaustedError(absl::StrCat("the sequence holds ", length_, " tokens and ",
                                                     num_tokens, " more would pass ", max_tokens_,
                                                     "; raise GpuSequence::Options::max_tokens"));
  }
  CRUMB_RETURN_IF_ERROR(pages_.Reserve(length_, num_tokens));
  step_tokens_ = num_tokens;
  return absl::OkStatus();
}

absl::Status GpuSequence::Impl::DelayUntilLayer(uint32_t layer, GpuStream stream) const {
  return upload_ == nullptr || upload_is_awaited_ ? absl::OkStatus()
                                                  : upload_->DelayUntilLayer(layer, stream);
}

void GpuSequence::Impl::EndStep() {
  pages_.Commit();
  length_ += std::exchange(step_tokens_, 0);
  upload_is_awaited_ = true;
}

void GpuSequence::Impl::AbandonStep() {
  pages_.Release();
  step_tokens_ = 0;
}

absl::StatusOr<std::unique_ptr<GpuSequence>> GpuSequence::Create(const Options& options) {
  if (options.pool == nullptr) {
    return absl::InvalidArgumentError(
        "GpuSequence::Options::pool is null; a sequence takes its pages from a pool");
  }
  if (options.max_tokens == 0 || options.max_tokens > kMaxTokens) {
    return absl::InvalidArgumentError(absl::StrCat("GpuSequence::Options::max_tokens is ",
                                                   options.max_tokens, "; it must be 1 to ",
                                                   kMaxTokens));
  }
  return std::unique_ptr<GpuSequence>(new GpuSequence(std::make_unique<Impl>(options)));
}

GpuSequence::GpuSequence(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

GpuSequence::~GpuSequence() {
  CRUMB_CHECK(impl_->step_tokens() == 0, "a sequence leaves its step before it goes");
}

uint32_t GpuSequence::length() const {
  return impl_->length();
}
const ProfileId* GpuSequence::profile_id() const {
  return &impl_->pool().options().profile->id();
}
HeadRange GpuSequence::heads() const {
  return impl_->pool().options().heads;
}
// shared: both with who else adopts the prefix.
absl::Status GpuSequence::Adopt(std::shared_ptr<PrefixHandle> prefix,
                                std::shared_ptr<GpuUpload> upload) {
  return impl_->Adopt(std::move(prefix), std::move(upload));
}
absl::Status GpuSequence::RetainTail(uint32_t prefix_tokens) {
  return impl_->RetainTail(prefix_tokens);
}
void GpuSequence::ReleaseTail() {
  impl_->ReleaseTail();
}
absl::Status GpuSequence::Validate() const {
  return impl_->Validate();
}
Sequence::Footprint GpuSequence::footprint() const {
  return impl_->footprint();
}
const std::byte* GpuSequence::Page(PageIdx page, PageEncoding encoding) const {
  return page.value() < impl_->length() / kPageTokens ? impl_->pages().Page(page, encoding)
                                                      : nullptr;
}

}  // namespace crumb
