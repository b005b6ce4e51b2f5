// SPDX-License-Identifier: Apache-2.0
//
// crumbctl --json says every field of every reply: what is added to a message and forgotten in its
// JSON fails here.
#include "daemon/ctl/json_reply.h"

#include <google/protobuf/message.h>

#include <cstring>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "daemon/ctl/format.h"
#include "nlohmann/json.hpp"

namespace crumb {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;
using Json = nlohmann::ordered_json;

// Packed token ids, which JSON has as numbers.
bool IsTokens(const FieldDescriptor& field) {
  return field.name() == "head_tokens";
}

// Every field of `message` gets a value that no other has; every list one entry.
void Fill(Message* message, uint32_t* next) {
  const Reflection& reflection = *message->GetReflection();
  for (int i = 0; i < message->GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor* field = message->GetDescriptor()->field(i);
    const uint32_t value = ++*next;
    const std::string text = field->type() == FieldDescriptor::TYPE_BYTES && !IsTokens(*field)
                                 ? std::string(32, static_cast<char>(value))
                                 : std::string(reinterpret_cast<const char*>(&value), 4);
    switch (field->cpp_type()) {
      case FieldDescriptor::CPPTYPE_MESSAGE:
        Fill(field->is_repeated() ? reflection.AddMessage(message, field)
                                  : reflection.MutableMessage(message, field),
             next);
        break;
      case FieldDescriptor::CPPTYPE_STRING: {
        const std::string words =
            field->type() == FieldDescriptor::TYPE_BYTES ? text : "text " + std::to_string(value);
        field->is_repeated() ? reflection.AddString(message, field, words)
                             : reflection.SetString(message, field, words);
        break;
      }
      case FieldDescriptor::CPPTYPE_UINT32:
        reflection.SetUInt32(message, field, value);
        break;
      case FieldDescriptor::CPPTYPE_UINT64:
        reflection.SetUInt64(message, field, (uint64_t{1} << 60) + value);
        break;
      case FieldDescriptor::CPPTYPE_DOUBLE:
        reflection.SetDouble(message, field, value + 0.5);
        break;
      case FieldDescriptor::CPPTYPE_BOOL:
        reflection.SetBool(message, field, true);
        break;
      default:
        FAIL() << field->full_name() << " is of a type that this test does not know";
    }
  }
}

Json ExpectedOf(const Message& message);

Json ExpectedOf(const Message& message, const FieldDescriptor& field) {
  const Reflection& reflection = *message.GetReflection();
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return field.is_repeated()
                 ? Json::array({ExpectedOf(reflection.GetRepeatedMessage(message, &field, 0))})
                 : ExpectedOf(reflection.GetMessage(message, &field));
    case FieldDescriptor::CPPTYPE_STRING: {
      if (field.is_repeated()) {
        return Json::array({reflection.GetRepeatedString(message, &field, 0)});
      }
      const std::string text = reflection.GetString(message, &field);
      if (IsTokens(field)) {
        uint32_t token = 0;
        std::memcpy(&token, text.data(), sizeof(token));
        return Json::array({token});
      }
      return field.type() == FieldDescriptor::TYPE_BYTES ? Hex(text) : text;
    }
    case FieldDescriptor::CPPTYPE_UINT32:
      return reflection.GetUInt32(message, &field);
    case FieldDescriptor::CPPTYPE_UINT64:
      return reflection.GetUInt64(message, &field);
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return reflection.GetDouble(message, &field);
    default:
      return reflection.GetBool(message, &field);
  }
}

Json ExpectedOf(const Message& message) {
  Json json = Json::object();
  for (int i = 0; i < message.GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor& field = *message.GetDescriptor()->field(i);
    json[std::string(field.name())] = ExpectedOf(message, field);
  }
  return json;
}

template <typename Reply>
class JsonReplyTest : public testing::Test {};

using Replies = testing::
    Types<v1::GetStatusReply, v1::Counters, v1::GetTreeReply, v1::ProbeReply, v1::EvictReply>;
TYPED_TEST_SUITE(JsonReplyTest, Replies);

TYPED_TEST(JsonReplyTest, SaysEveryFieldByItsName) {
  TypeParam reply;
  uint32_t next = 0;
  Fill(&reply, &next);
  // By content, whatever the order.
  EXPECT_EQ(nlohmann::json::parse(ToJson(reply).dump()),
            nlohmann::json::parse(ExpectedOf(reply).dump()))
      << ToJson(reply).dump(1);
}

}  // namespace
}  // namespace crumb
