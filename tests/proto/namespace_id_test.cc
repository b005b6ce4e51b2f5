// SPDX-License-Identifier: Apache-2.0
#include "proto/page/namespace_id.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace crumb {
namespace {

ProfileId ProfileOf(std::string_view text) {
  return ComputeProfileId(std::as_bytes(std::span(text)));
}

// Computed with Python's hashlib over the construction in the header's words.
TEST(NamespaceIdTest, DigestsAreGolden) {
  const ProfileId profile = ProfileOf("profile file");
  EXPECT_EQ(profile.Hex(), "90bb6fed7dbe3e121d9860f8618d1b603e443ea3c8f9df1ee5fbd9098bb66184");
  EXPECT_EQ(ComputeNamespaceId("acme", profile, "lora-7").Hex(),
            "6204734d44e2562710cda64273cce2f7e5f939752fe601c5c127db64584b7729");
  EXPECT_EQ(ComputeNamespaceId("", profile, "").Hex(),
            "68588c9be543644adf1cfcb4eee2880f4b46d65a0a20892a63bd68e73a92ae83");
}

TEST(NamespaceIdTest, NoTwoTriplesShareANamespace) {
  const std::string zero(1, '\0');
  std::set<std::string> seen;
  size_t count = 0;
  for (const std::string& tenant :
       {std::string(), std::string("a"), std::string("ab"), zero, "a" + zero, std::string("abc")}) {
    for (const char* profile : {"p", "q"}) {
      for (const std::string& key :
           {std::string(), std::string("c"), std::string("bc"), zero, std::string("abc")}) {
        seen.insert(ComputeNamespaceId(tenant, ProfileOf(profile), key).Hex());
        ++count;
      }
    }
  }
  EXPECT_EQ(seen.size(), count);
}

}  // namespace
}  // namespace crumb
