// SPDX-License-Identifier: Apache-2.0
#include "client/session/lookup_stub.h"

#include <google/protobuf/io/coded_stream.h>
#include <grpc/slice.h>

#include <bit>
#include <cstddef>
#include <cstring>
#include <thread>

#include "absl/time/time.h"

#include "proto/base/clock.h"

namespace crumb {
namespace {

static_assert(std::endian::native == std::endian::little, "tokens travel as they lie in memory");

// For so long a caller looks for the answer before it sleeps: as long as a lookup of 100,000 tokens
// takes. The engine has nothing to do before the answer is there, and to wake a core that sleeps
// costs a quarter of the whole. A daemon that takes longer is busy, or stopped.
constexpr absl::Duration kSpin = absl::Microseconds(300);

}  // namespace

grpc::ByteBuffer EncodeLookup(const v1::LookupRequest& rest, std::span<const uint32_t> tokens) {
  using google::protobuf::io::CodedOutputStream;
  constexpr uint32_t kLengthDelimited = 2;  // The wire type of bytes.
  constexpr uint32_t kTag = v1::LookupRequest::kTokensFieldNumber << 3 | kLengthDelimited;
  const size_t rest_bytes = rest.ByteSizeLong();
  const auto tokens_bytes = static_cast<uint32_t>(tokens.size_bytes());
  const size_t bytes = rest_bytes + CodedOutputStream::VarintSize32(kTag) +
                       CodedOutputStream::VarintSize32(tokens_bytes) + tokens_bytes;
  const grpc::Slice slice(grpc_slice_malloc(bytes), grpc::Slice::STEAL_REF);
  // No one else has the slice yet. The fields of a message may come in any order.
  auto* at = const_cast<uint8_t*>(slice.begin());
  at = rest.SerializeWithCachedSizesToArray(at);
  at = CodedOutputStream::WriteVarint32ToArray(kTag, at);
  at = CodedOutputStream::WriteVarint32ToArray(tokens_bytes, at);
  if (!tokens.empty()) {
    std::memcpy(at, tokens.data(), tokens_bytes);
  }
  return {&slice, 1};
}

grpc::Status LookupStub::Lookup(grpc::ClientContext& context,
                                const v1::LookupRequest& rest,
                                std::span<const uint32_t> tokens,
                                v1::LookupReply* reply) {
  grpc::CompletionQueue queue;
  const auto call = stub_.PrepareUnaryCall(&context, "/crumb.v1.Cache/Lookup",
                                           EncodeLookup(rest, tokens), &queue);
  call->StartCall();
  grpc::Status status;
  call->Finish(reply, &status, nullptr);
  void* tag = nullptr;
  bool is_ok = false;
  const absl::Time spin_end = Clock::System().Now() + kSpin;
  while (Clock::System().Now() < spin_end) {
    if (queue.AsyncNext(&tag, &is_ok, gpr_inf_past(GPR_CLOCK_MONOTONIC)) ==
        grpc::CompletionQueue::GOT_EVENT) {
      return status;
    }
    std::this_thread::yield();  // The daemon may be waiting for this core.
  }
  queue.Next(&tag, &is_ok);
  return status;
}

}  // namespace crumb
