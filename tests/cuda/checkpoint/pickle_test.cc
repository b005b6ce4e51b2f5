// SPDX-License-Identifier: Apache-2.0
#include "cuda/checkpoint/pickle.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <string_view>

#include "absl/strings/str_cat.h"

#include "cuda/checkpoint/pickle_opcodes.h"

namespace crumb::checkpoint {
namespace {

using testing::AllOf;
using testing::HasSubstr;

// "\x80\x02" and the opcodes.
absl::StatusOr<PickleTree> Parse(std::string_view opcodes) {
  const std::string pickle = absl::StrCat("\x80\x02", std::string(opcodes));
  return ParsePickle(std::as_bytes(std::span(pickle)));
}

std::string ErrorOf(std::string_view opcodes) {
  const auto tree = Parse(opcodes);
  if (tree.ok()) {
    return "accepted";
  }
  EXPECT_EQ(tree.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(tree.status().message());
}

std::string Text(std::string_view text) {
  return absl::StrCat("X", std::string(1, static_cast<char>(text.size())), std::string(3, '\0'),
                      std::string(text));
}

// All opcodes of the list in pickle.h.
std::set<uint8_t> Understood() {
  std::set<uint8_t> understood;
  for (const char c : std::string(".(NJKMGX)t]ae}suqrhjcQR")) {
    understood.insert(static_cast<uint8_t>(c));
  }
  understood.insert({0x85, 0x86, 0x87, 0x88, 0x89});
  return understood;
}

TEST(PickleTest, ReadsDictsListsNumbersAndText) {
  using namespace std::string_literals;  // NOLINT: Strings with zero bytes.
  const auto tree = Parse("}(" + Text("a") + "K\x07" + Text("b") + "](M\x01\x02J\xff\xff\xff\xff" +
                          "G\xbf\xf8\0\0\0\0\0\0"s + "N\x88\x89" + "e" + Text("c") + ")u.");
  ASSERT_TRUE(tree.ok()) << tree.status();
  const auto* root = tree->Get<PickleDict>(tree->root);
  ASSERT_NE(root, nullptr);
  EXPECT_EQ(std::get<int64_t>(*tree->Find(*root, "a")), 7);
  const auto& list = std::get<PickleList>(*tree->Find(*root, "b"));
  ASSERT_EQ(list.items.size(), 6U);
  EXPECT_EQ(*tree->Get<int64_t>(list.items[0]), 0x0201);
  EXPECT_EQ(*tree->Get<int64_t>(list.items[1]), -1);
  EXPECT_EQ(*tree->Get<double>(list.items[2]), -1.5);
  EXPECT_NE(tree->Get<PickleNone>(list.items[3]), nullptr);
  EXPECT_TRUE(*tree->Get<bool>(list.items[4]));
  EXPECT_FALSE(*tree->Get<bool>(list.items[5]));
  EXPECT_TRUE(std::get<PickleTuple>(*tree->Find(*root, "c")).items.empty());
  EXPECT_EQ(tree->Find(*root, "d"), nullptr);
}

TEST(PickleTest, EveryOpcodeThatIsNotNeededIsRefusedByName) {
  const std::set<uint8_t> understood = Understood();
  for (int byte = 0; byte < 256; ++byte) {
    const auto opcode = static_cast<uint8_t>(byte);
    if (!understood.contains(opcode)) {
      EXPECT_THAT(ErrorOf(std::string({'N', static_cast<char>(byte)})),
                  AllOf(HasSubstr("byte 3: opcode " + std::string(PickleOpcodeName(opcode))),
                        HasSubstr("is refused")));
    }
  }
  EXPECT_THAT(ErrorOf("(i"), HasSubstr("opcode INST (0x69)"));
  EXPECT_THAT(ErrorOf("\x93"), HasSubstr("opcode STACK_GLOBAL (0x93)"));
  EXPECT_THAT(ErrorOf("\xfe"), HasSubstr("opcode unknown (0xfe)"));
}

TEST(PickleTest, EveryGlobalThatIsNotKnownIsRefusedByName) {
  for (const char* global : {"os\nsystem", "builtins\neval", "torch\nload", "torch FloatStorage\n",
                             "collections\nOrderedDict.pop", "torch.\n_utils _rebuild_tensor_v2"}) {
    EXPECT_THAT(ErrorOf(absl::StrCat("c", global, "\n.")), HasSubstr("is refused; known are"));
  }
  EXPECT_THAT(ErrorOf("cos\nsystem\n."), HasSubstr("global 'os system'"));
  EXPECT_THAT(ErrorOf(absl::StrCat("c", std::string(300, 'm'), "\n")),
              HasSubstr("more than 256 bytes"));
}

TEST(PickleTest, KnownGlobalsAreOnlyCalledAsTorchCallsThem) {
  const std::string ordered = "ccollections\nOrderedDict\n";
  EXPECT_TRUE(Parse(ordered + ")R.").ok());
  EXPECT_THAT(ErrorOf(ordered + "K\x01\x85R."), HasSubstr("does not take"));
  EXPECT_THAT(ErrorOf(ordered + "}R."), HasSubstr("REDUCE of a global and a dict"));
  EXPECT_THAT(ErrorOf("ctorch\nFloatStorage\n)R."), HasSubstr("does not take"));
  EXPECT_THAT(ErrorOf("ctorch._utils\n_rebuild_tensor_v2\n)R."), HasSubstr("a tensor of 0"));
  EXPECT_THAT(ErrorOf("NQ."), HasSubstr("BINPERSID of None"));
  EXPECT_THAT(ErrorOf("(NNNNNtQ."), HasSubstr("names no storage"));
}

TEST(PickleTest, EveryPrefixOfAPickleIsRefused) {
  const std::string whole = "}q\x01(" + Text("key") + "(K\x01K\x02tr" + std::string(4, '\x05') +
                            Text("again") + "h\x01u.";
  ASSERT_TRUE(Parse(whole).ok());
  for (size_t length = 0; length < whole.size(); ++length) {
    EXPECT_FALSE(Parse(whole.substr(0, length)).ok()) << length;
  }
  EXPECT_THAT(ErrorOf(whole + "."), HasSubstr("1 bytes unread"));
}

TEST(PickleTest, LengthsAreNotTrusted) {
  EXPECT_THAT(ErrorOf("X\xff\xff\xff\xff"), HasSubstr("4294967295 bytes are to follow"));
  EXPECT_THAT(ErrorOf("r\xff\xff\xff\xff"), HasSubstr("empty stack"));
  EXPECT_TRUE(Parse("Nr\xff\xff\xff\xff.").ok());  // A slot is a name, not a size.
  const std::vector<std::byte> huge(kMaxPickleBytes + 1);
  EXPECT_THAT(ParsePickle(huge).status().message(), HasSubstr("at most 4194304"));
}

TEST(PickleTest, TheStackIsNotTrusted) {
  EXPECT_THAT(ErrorOf("."), HasSubstr("empty stack"));
  EXPECT_THAT(ErrorOf("NN."), HasSubstr("leaves 1 values"));
  EXPECT_THAT(ErrorOf("t"), HasSubstr("no"));
  EXPECT_THAT(ErrorOf("N(\x85"), HasSubstr("empty stack"));  // Not below the mark.
  EXPECT_THAT(ErrorOf("h\x01"), HasSubstr("memo slot 1"));
  EXPECT_THAT(ErrorOf("NNNs"), HasSubstr("2 items for None"));
  EXPECT_THAT(ErrorOf("}(Nu"), HasSubstr("1 items for a dict"));
  EXPECT_THAT(ErrorOf("}Na"), HasSubstr("a list is expected"));
}

TEST(PickleTest, DeepAndCircularPicklesCostWhatTheyWeigh) {
  const size_t deep = 1'000'000;
  EXPECT_TRUE(Parse(absl::StrCat(")", std::string(deep, '\x85'), ".")).ok());
  EXPECT_FALSE(Parse(std::string(deep, '(')).ok());
  // A dict that holds itself.
  const auto circle = Parse("}q\x01" + Text("self") + "h\x01s.");
  ASSERT_TRUE(circle.ok());
  const auto* dict = circle->Get<PickleDict>(circle->root);
  EXPECT_EQ(circle->Find(*dict, "self"), &circle->values[circle->root]);
}

TEST(PickleTest, OtherProtocolsAreRefused) {
  const std::string four = "\x80\x04N.";
  EXPECT_THAT(ParsePickle(std::as_bytes(std::span(four))).status().message(),
              HasSubstr("does not begin as protocol 2"));
  const std::string zero = "N.";
  EXPECT_FALSE(ParsePickle(std::as_bytes(std::span(zero))).ok());
  EXPECT_FALSE(ParsePickle({}).ok());
}

}  // namespace
}  // namespace crumb::checkpoint
