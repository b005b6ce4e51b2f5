// SPDX-License-Identifier: Apache-2.0
//
// From the wire to values: the limits of cache.proto and admin.proto, each refused by a message
// that names the field, its value, the limit and what to do. All return INVALID_ARGUMENT.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "crumb/cuda/profile.h"
#include "crumb/cuda/shared_memory.h"
#include "daemon/demote/page_writer.h"
#include "google/protobuf/io/coded_stream.h"
#include "proto/base/ids.h"
#include "proto/crumb/v1/cache.pb.h"
#include "proto/page/head_range.h"

namespace crumb {

inline constexpr size_t kMaxTokens = size_t{1} << 20;  // Of a prompt or a published prefix.
// Ids of vocabularies are far smaller; the rest is room for engines that stand hashes of images in
// for tokens. What it keeps out is negative ids and bytes that are no tokens.
inline constexpr uint32_t kMaxTokenId = (uint32_t{1} << 31) - 1;
inline constexpr size_t kMaxNameBytes = 128;
inline constexpr size_t kMaxContextKeyBytes = 256;
inline constexpr size_t kMaxProfileFileBytes = Profile::kMaxFileBytes;
inline constexpr size_t kMaxLeasesPerRequest = 65536;

// Token ids out of their packed form, in place where that is an aligned string. Move-only: the view
// may be of its own storage. Must not outlive the string it was parsed from.
class TokenList {
 public:
  static absl::StatusOr<TokenList> Parse(const std::string& packed);
  // As Parse, but none at all is fine (Evict: the whole namespace).
  static absl::StatusOr<TokenList> ParseOrEmpty(const std::string& packed);
  // As Parse, of the next `bytes` bytes of a message, which are read or skipped even if they are
  // refused. Copies them, once. Also INVALID_ARGUMENT: the message ends before.
  static absl::StatusOr<TokenList> Read(size_t bytes,
                                        google::protobuf::io::CodedInputStream& input);

  std::span<const uint32_t> ids() const { return ids_; }

  TokenList(TokenList&&) = default;
  TokenList& operator=(TokenList&&) = default;
  TokenList(const TokenList&) = delete;
  TokenList& operator=(const TokenList&) = delete;
  ~TokenList() = default;

 private:
  TokenList() = default;

  std::unique_ptr<uint32_t[]> storage_;
  std::span<const uint32_t> ids_;
};

// What an engine asks for when it attaches, checked but for what needs the profile.
struct AttachSpec {
  std::string client_name;
  uint32_t pid = 0;
  std::string tenant;
  ProfileId profile_id;
  HeadRange heads;                            // count 0: all.
  std::optional<GpuUuid> gpu = std::nullopt;  // On which it reads pages.
};
absl::StatusOr<AttachSpec> ParseAttach(const v1::AttachRequest& request);

absl::Status CheckContextKey(std::string_view context_key);
absl::StatusOr<NamespaceId> ParseNamespaceId(std::string_view bytes);
absl::StatusOr<std::vector<LeaseId>> ParseLeases(
    const google::protobuf::RepeatedField<uint64_t>& lease_ids);
absl::StatusOr<std::vector<StagedPage>> ParseStaged(
    const google::protobuf::RepeatedPtrField<v1::StagedPage>& staged);

}  // namespace crumb
