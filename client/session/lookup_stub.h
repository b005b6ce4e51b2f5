// SPDX-License-Identifier: Apache-2.0
//
// How a lookup is called: it is on the way to an engine's first token. A prompt of 100,000 tokens
// is 400 KB, which the generated stub copies into a protobuf object and again into its encoding;
// here it goes straight into the encoding. And the caller looks for the answer for a while before
// it sleeps. docs/decisions/0043-lookups-as-bytes.md has what each is worth.
#pragma once

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/codegen/proto_utils.h>

#include <cstdint>
#include <memory>
#include <span>

#include "proto/crumb/v1/cache.pb.h"

namespace crumb {

// A LookupRequest on the wire: `rest`, which has no tokens, with `tokens`. A copy: neither is read
// after it returns.
grpc::ByteBuffer EncodeLookup(const v1::LookupRequest& rest, std::span<const uint32_t> tokens);

// Thread-safe.
class LookupStub {
 public:
  // shared: gRPC's way of handing out channels.
  explicit LookupStub(std::shared_ptr<grpc::Channel> channel) : stub_(std::move(channel)) {}

  // As the generated stub's Lookup, but for the tokens. Blocks until there is an answer, the
  // context's deadline has passed, or it was cancelled.
  grpc::Status Lookup(grpc::ClientContext& context,
                      const v1::LookupRequest& rest,
                      std::span<const uint32_t> tokens,
                      v1::LookupReply* reply);

 private:
  grpc::TemplatedGenericStub<grpc::ByteBuffer, v1::LookupReply> stub_;
};

}  // namespace crumb
