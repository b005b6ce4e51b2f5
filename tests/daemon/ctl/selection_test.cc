// SPDX-License-Identifier: Apache-2.0
#include "daemon/ctl/selection.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace crumb {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

v1::GetStatusReply StatusWith(const std::vector<std::string>& ids) {
  v1::GetStatusReply status;
  for (const std::string& id : ids) {
    v1::NamespaceInfo& space = *status.add_namespaces();
    space.set_namespace_id(id);
    space.set_tenant("tenant-" + std::to_string(status.namespaces_size()));
    space.set_context_key("key\n" + std::to_string(status.namespaces_size()));
  }
  return status;
}

TEST(SelectionTest, FirstDigitsNameANamespaceAndNothingTheOnlyOne) {
  const v1::GetStatusReply one = StatusWith({"\xab\xcd"});
  EXPECT_EQ(SelectNamespace(one, "")->tenant(), "tenant-1");
  const v1::GetStatusReply two = StatusWith({"\xab\xcd", "\xab\xef"});
  EXPECT_EQ(SelectNamespace(two, "abe")->tenant(), "tenant-2");
  EXPECT_EQ(SelectNamespace(two, "ABCD")->tenant(), "tenant-1");
}

TEST(SelectionTest, NoneSaysWhereToLook) {
  EXPECT_THAT(std::string(SelectNamespace(StatusWith({}), "").status().message()),
              HasSubstr("holds no namespace yet"));
  const auto other = SelectNamespace(StatusWith({"\xab\xcd"}), "cd");
  EXPECT_EQ(other.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(other.status().message()),
              AllOf(HasSubstr("starts with cd"), HasSubstr("crumbctl status")));
}

TEST(SelectionTest, SeveralAreListedWithWhatTellsThemApart) {
  const auto several = SelectNamespace(StatusWith({"\xab\xcd", "\xab\xef", "\x12"}), "ab");
  EXPECT_EQ(several.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(several.status().message()),
              AllOf(HasSubstr("2 namespaces start with ab"), HasSubstr("--namespace"),
                    HasSubstr("tenant-1"), HasSubstr("tenant-2"), HasSubstr("key\\x0a2"),
                    Not(HasSubstr("tenant-3"))));
}

TEST(TokenTextTest, IdsAreSeparatedByCommasOrWhiteSpace) {
  EXPECT_THAT(*ParseTokenText("1,2, 3\n4\t5 ,"), ElementsAre(1u, 2u, 3u, 4u, 5u));
  EXPECT_THAT(*ParseTokenText("4294967295"), ElementsAre(4294967295u));
}

TEST(TokenTextTest, WhatIsNoIdIsNamedWithItsPlace) {
  for (const std::string word : {"x", "-1", "1.5", "4294967296", "0x10"}) {
    const auto tokens = ParseTokenText("7," + word);
    EXPECT_EQ(tokens.status().code(), absl::StatusCode::kInvalidArgument) << word;
    EXPECT_THAT(std::string(tokens.status().message()), HasSubstr("token 1 is \"" + word + "\""));
  }
  EXPECT_THAT(std::string(ParseTokenText(" ,\n").status().message()), HasSubstr("no tokens"));
}

TEST(TokenFileTest, IsReadOrNamed) {
  const std::string path =
      (std::filesystem::path(testing::TempDir()) / absl::StrCat("selection_test.", getpid()))
          .string();
  std::ofstream(path) << "1 2\n3";
  EXPECT_THAT(*ReadTokenFile(path), ElementsAre(1u, 2u, 3u));
  std::filesystem::remove(path);
  const auto missing = ReadTokenFile(path);
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(missing.status().message()), HasSubstr(path));
  const auto folder = ReadTokenFile(testing::TempDir());
  EXPECT_THAT(std::string(folder.status().message()), HasSubstr("is a folder"));
}

}  // namespace
}  // namespace crumb
