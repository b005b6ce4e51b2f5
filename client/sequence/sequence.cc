// SPDX-License-Identifier: Apache-2.0
#include "crumb/sequence.h"

#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"

#include "client/sequence/sequence_impl.h"
#include "proto/base/status_macros.h"
#include "proto/page/check_heads.h"

namespace crumb {
namespace {

constexpr uint32_t kMaxThreads = 256;
constexpr uint32_t kMaxGroup = 64;         // SplitAttentionParams::group.
constexpr uint32_t kMaxTokens = 1u << 30;  // Keeps positions and their pages within 32 bits.

template <typename Value, typename Limit>
absl::Status BadOption(const char* option, const Value& value, const Limit& limit) {
  return absl::InvalidArgumentError(
      absl::StrCat("Sequence::Options::", option, " is ", value, "; it must be ", limit));
}

absl::Status CheckOptions(const Sequence::Options& options) {
  const HeadRange& heads = options.heads;
  CRUMB_RETURN_IF_ERROR(
      CheckHeads("Sequence::Options::heads", heads, options.profile->geometry().num_kv_heads));
  if (options.num_query_heads == 0 || options.num_query_heads % heads.count != 0 ||
      options.num_query_heads / heads.count > kMaxGroup) {
    return BadOption("num_query_heads", options.num_query_heads,
                     absl::StrCat("a multiple of the rank's ", heads.count, " KV heads, at most ",
                                  kMaxGroup, " times as many"));
  }
  if (!std::isfinite(options.scale) || options.scale < 0) {
    return BadOption("scale", options.scale, "positive, or 0 for 1 / sqrt(key_dim)");
  }
  if (options.max_tokens == 0 || options.max_tokens > kMaxTokens) {
    return BadOption("max_tokens", options.max_tokens, absl::StrCat("1 to ", kMaxTokens));
  }
  if (options.num_threads == 0 || options.num_threads > kMaxThreads) {
    return BadOption("num_threads", options.num_threads, absl::StrCat("1 to ", kMaxThreads));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Sequence>> Sequence::Create(Options options) {
  if (options.profile == nullptr) {
    return BadOption("profile", "null", "a loaded profile");
  }
  const Geometry& geometry = options.profile->geometry();
  options.heads = options.heads.Resolve(geometry.num_kv_heads);
  CRUMB_RETURN_IF_ERROR(CheckOptions(options));
  if (options.scale == 0) {
    options.scale = 1.0f / std::sqrt(static_cast<float>(geometry.key_dim));
  }
  return std::unique_ptr<Sequence>(new Sequence(std::make_unique<Impl>(std::move(options))));
}

Sequence::Sequence(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Sequence::~Sequence() = default;

uint32_t Sequence::length() const {
  return impl_->length();
}
const Profile& Sequence::profile() const {
  return *impl_->options().profile;
}
HeadRange Sequence::heads() const {
  return impl_->options().heads;
}
// shared: with the handle's other users.
absl::Status Sequence::Adopt(std::shared_ptr<SharedPrefix> prefix) {
  return impl_->Adopt(std::move(prefix));
}
absl::Status Sequence::RetainTail(uint32_t prefix_tokens) {
  return impl_->RetainTail(prefix_tokens);
}
void Sequence::ReleaseTail() {
  impl_->ReleaseTail();
}
absl::Status Sequence::BeginChunk(uint32_t num_tokens) {
  return impl_->BeginChunk(num_tokens);
}
absl::Status Sequence::Append(uint32_t layer,
                              std::span<const float> keys,
                              std::span<const float> values) {
  return impl_->Append(layer, keys, values);
}
absl::Status Sequence::Attend(uint32_t layer,
                              std::span<const float> queries,
                              std::span<float> out) {
  return impl_->Attend(layer, queries, out);
}
absl::Status Sequence::EndChunk() {
  return impl_->EndChunk();
}
void Sequence::AbandonChunk() {
  impl_->AbandonChunk();
}
Sequence::Footprint Sequence::footprint() const {
  return impl_->footprint();
}
bool Sequence::HasPage(PageIdx page, PageEncoding encoding) const {
  return impl_->HasPage(page, encoding);
}
absl::Status Sequence::ExportPage(PageIdx page,
                                  PageEncoding encoding,
                                  std::span<std::byte> image,
                                  std::span<uint32_t> head_crc32c) const {
  return impl_->ExportPage(page, encoding, image, head_crc32c);
}

}  // namespace crumb
