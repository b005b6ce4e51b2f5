// SPDX-License-Identifier: Apache-2.0
//
// A LookupRequest out of the bytes that came, with its tokens where the index reads them. protobuf
// would copy them into a string, and they would be read once more to be checked: of a prompt of
// 100,000 tokens that is 400 KB each time, as much as the search itself.
#pragma once

#include "absl/status/statusor.h"
#include "grpcpp/support/byte_buffer.h"

#include "daemon/rpc/request.h"
#include "proto/crumb/v1/cache.pb.h"

namespace crumb {

struct LookupMessage {
  v1::LookupRequest rest;  // All but `tokens`, which is empty in it.
  // Or why TokenList::Parse refuses them: of several faults, others are told first.
  absl::StatusOr<TokenList> tokens;
};

// INVALID_ARGUMENT: bytes that are no LookupRequest.
absl::StatusOr<LookupMessage> DecodeLookup(const grpc::ByteBuffer& bytes);

}  // namespace crumb
