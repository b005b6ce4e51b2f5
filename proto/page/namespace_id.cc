// SPDX-License-Identifier: Apache-2.0
#include "proto/page/namespace_id.h"

#include <openssl/sha.h>

#include <cstdint>
#include <string>

namespace crumb {
namespace {

Digest Sha256(std::span<const std::byte> bytes) {
  Digest digest;
  SHA256(reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(), digest.bytes.data());
  return digest;
}

void AppendPart(std::string_view part, std::string* out) {
  for (uint64_t length = part.size(), byte = 0; byte < 8; ++byte) {
    out->push_back(static_cast<char>(length >> (8 * byte)));
  }
  out->append(part);
}

}  // namespace

ProfileId ComputeProfileId(std::span<const std::byte> profile_file) {
  return {Sha256(profile_file)};
}

NamespaceId ComputeNamespaceId(std::string_view tenant,
                               const ProfileId& profile_id,
                               std::string_view context_key) {
  std::string text = "crumb.namespace.v1";
  AppendPart(tenant, &text);
  AppendPart({reinterpret_cast<const char*>(profile_id.bytes.data()), Digest::kBytes}, &text);
  AppendPart(context_key, &text);
  return {Sha256(std::as_bytes(std::span(text)))};
}

}  // namespace crumb
