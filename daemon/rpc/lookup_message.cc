// SPDX-License-Identifier: Apache-2.0
#include "daemon/rpc/lookup_message.h"

#include <cstdint>
#include <string>

#include "grpcpp/support/proto_buffer_reader.h"

#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"

namespace crumb {
namespace {

using google::protobuf::io::CodedInputStream;
using google::protobuf::io::CodedOutputStream;

enum WireType : uint32_t { kVarint = 0, kFixed64 = 1, kLengthDelimited = 2, kFixed32 = 5 };

constexpr uint32_t kTokensTag =
    v1::LookupRequest::kTokensFieldNumber << 3 | uint32_t{kLengthDelimited};

absl::Status NoLookupRequest() {
  return absl::InvalidArgumentError(
      "the message is no crumb.v1.LookupRequest: encode it as cache.proto of this release says");
}

// Copies the field after `tag`. False: it is none.
bool CopyField(uint32_t tag, CodedInputStream& input, CodedOutputStream& output) {
  output.WriteTag(tag);
  uint64_t number = 0;
  uint32_t small = 0;
  switch (tag & 7) {
    case kVarint:
      if (!input.ReadVarint64(&number)) {
        return false;
      }
      output.WriteVarint64(number);
      return true;
    case kFixed64:
      if (!input.ReadLittleEndian64(&number)) {
        return false;
      }
      output.WriteLittleEndian64(number);
      return true;
    case kFixed32:
      if (!input.ReadLittleEndian32(&small)) {
        return false;
      }
      output.WriteLittleEndian32(small);
      return true;
    case kLengthDelimited: {
      std::string bytes;
      int size = 0;
      if (!input.ReadVarintSizeAsInt(&size) || !input.ReadString(&bytes, size)) {
        return false;
      }
      output.WriteVarint32(static_cast<uint32_t>(size));
      output.WriteString(bytes);
      return true;
    }
    default:
      return false;  // Groups: this contract never had one.
  }
}

}  // namespace

absl::StatusOr<LookupMessage> DecodeLookup(const grpc::ByteBuffer& bytes) {
  grpc::ByteBuffer view(bytes);  // Of the same slices.
  grpc::ProtoBufferReader reader(&view);
  CodedInputStream input(&reader);
  std::string rest;
  LookupMessage message{.rest = {}, .tokens = TokenList::Parse("")};
  {
    google::protobuf::io::StringOutputStream stream(&rest);
    CodedOutputStream output(&stream);
    while (const uint32_t tag = input.ReadTag()) {
      int size = 0;
      const bool is_tokens = tag == kTokensTag;
      if (is_tokens ? !input.ReadVarintSizeAsInt(&size) : !CopyField(tag, input, output)) {
        return NoLookupRequest();
      }
      if (is_tokens) {
        message.tokens = TokenList::Read(static_cast<size_t>(size),
                                         input);  // The last of several, as protobuf does.
      }
    }
  }
  if (!input.ConsumedEntireMessage() || !message.rest.ParseFromString(rest)) {
    return NoLookupRequest();
  }
  return message;
}

}  // namespace crumb
