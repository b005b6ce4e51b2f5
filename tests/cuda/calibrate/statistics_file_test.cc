// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <limits>
#include <string>
#include <vector>

#include "crumb/cuda/statistics.h"
#include "proto/base/file.h"
#include "tests/cuda/calibrate/collected.h"
#include "tests/cuda/profile/profile_parts.h"

namespace crumb {
namespace {

using testing::AllOf;
using testing::HasSubstr;

Statistics SmallStatistics() {
  StatisticsCollector collector = MakeCollector();
  Add(&collector, 300, 1);
  return Finished(collector);
}

std::vector<std::byte> FileOf(const Statistics& statistics) {
  auto file = Statistics::Serialize(statistics);
  EXPECT_TRUE(file.ok()) << file.status();
  return file.ok() ? *std::move(file) : std::vector<std::byte>();
}

std::string ErrorOf(const std::vector<std::byte>& file) {
  const auto statistics = Statistics::Parse(file);
  return statistics.ok() ? "accepted" : std::string(statistics.status().message());
}

TEST(StatisticsFileTest, WhatWasWrittenIsRead) {
  const Statistics statistics = SmallStatistics();
  const auto file = FileOf(statistics);
  EXPECT_EQ(file, FileOf(statistics));
  const auto read = Statistics::Parse(file);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->model, statistics.model);
  EXPECT_EQ(read->geometry, statistics.geometry);
  EXPECT_EQ(read->num_query_heads, statistics.num_query_heads);
  EXPECT_EQ(read->num_texts, statistics.num_texts);
  EXPECT_EQ(read->num_tokens, statistics.num_tokens);
  for (const auto member : kMeans) {
    EXPECT_EQ((*read).*member, statistics.*member);
  }
  EXPECT_EQ(read->attention_windows, statistics.attention_windows);
  ExpectSameReservoir(read->reservoir, statistics.reservoir);
}

TEST(StatisticsFileTest, AReservoirMayBeEmpty) {
  Statistics statistics = SmallStatistics();
  statistics.reservoir = {};
  const auto read = Statistics::Parse(FileOf(statistics));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_TRUE(read->reservoir.empty());
}

TEST(StatisticsFileTest, EachBadFieldIsNamed) {
  const auto good = FileOf(SmallStatistics());
  const auto replaced = [&](const char* from, const char* to) {
    return ErrorOf(SplitFile::Of(good).Replace(from, to).Join());
  };
  EXPECT_THAT(replaced("crumb.statistics.v3", "crumb.profile.v1"),
              AllOf(HasSubstr("'format'"), HasSubstr("crumb.profile.v1")));
  EXPECT_THAT(replaced("\"num_texts\":\"1\"", "\"num_texts\":\"0\""),
              HasSubstr("'num_texts' is 0"));
  EXPECT_THAT(replaced("\"num_tokens\":\"300\"", "\"num_tokens\":\"0\""),
              HasSubstr("'num_tokens' is 0"));
  EXPECT_THAT(replaced("\"num_query_heads\":\"6\"", "\"num_query_heads\":\"7\""),
              AllOf(HasSubstr("'num_query_heads' is 7"), HasSubstr("2 KV heads")));
  EXPECT_THAT(replaced("\"num_layers\":\"2\"", "\"num_layers\":\"3\""),
              AllOf(HasSubstr("'query_moment'"), HasSubstr("[3, 2, 32, 32]")));
  EXPECT_THAT(replaced("\"key_mean\"", "\"key_mode\""), HasSubstr("'key_mean' is missing"));
  EXPECT_THAT(replaced("\"key_moment\"", "\"key_memont\""), HasSubstr("'key_moment' is missing"));
  EXPECT_THAT(replaced("\"query_mean\"", "\"query_mode\""), HasSubstr("'query_mean' is missing"));
}

TEST(StatisticsFileTest, EachBadValueIsNamed) {
  const Statistics good = SmallStatistics();
  const auto spoilt = [&](auto what) {
    Statistics bad = good;
    what(&bad);
    const auto file = Statistics::Serialize(bad);
    return file.ok() ? "accepted" : std::string(file.status().message());
  };
  EXPECT_THAT(
      spoilt([](Statistics* s) { s->query_moment[3] = std::numeric_limits<double>::quiet_NaN(); }),
      AllOf(HasSubstr("'query_moment'"), HasSubstr("element 3 is NaN")));
  EXPECT_THAT(spoilt([](Statistics* s) { s->query_moment[32 * 32 + 33] = -1; }),
              AllOf(HasSubstr("'query_moment', layer 0, KV head 1 [32, 32]"),
                    HasSubstr("element 1 of the diagonal is -1")));
  EXPECT_THAT(spoilt([](Statistics* s) { s->value_covariance[2 * 64 * 64 + 1] += 1; }),
              AllOf(HasSubstr("'value_covariance', layer 1, KV head 0"), HasSubstr("not symmetric"),
                    HasSubstr("(1, 0)")));
  EXPECT_THAT(spoilt([](Statistics* s) { s->key_mean.pop_back(); }),
              AllOf(HasSubstr("key_mean has 127 values"), HasSubstr("128")));
  EXPECT_THAT(spoilt([](Statistics* s) { s->geometry.num_layers = 0; }), HasSubstr("geometry"));
  EXPECT_THAT(spoilt([](Statistics* s) { s->key_mean[32] += 100; }),
              AllOf(HasSubstr("'key_moment', layer 0, KV head 1 [32, 32], less that of its mean"),
                    HasSubstr("eigenvalue below")));
  EXPECT_THAT(spoilt([](Statistics* s) {
                const double most = 2 * std::sqrt(s->query_moment[0] * s->query_moment[33]);
                s->query_moment[1] = s->query_moment[32] = most;
              }),
              AllOf(HasSubstr("'query_moment', layer 0, KV head 0"), HasSubstr("eigenvalue")));
}

TEST(StatisticsFileTest, EachBadPartOfTheReservoirIsNamed) {
  const Statistics good = SmallStatistics();
  const auto spoilt = [&](auto what) {
    Statistics bad = good;
    what(&bad.reservoir);
    const auto file = Statistics::Serialize(bad);
    return file.ok() ? "accepted" : std::string(file.status().message());
  };
  EXPECT_THAT(spoilt([](Reservoir* r) { r->values[9] = std::numeric_limits<float>::infinity(); }),
              AllOf(HasSubstr("'reservoir.values'"), HasSubstr("element 9 is")));
  EXPECT_THAT(spoilt([](Reservoir* r) { r->lse.pop_back(); }),
              AllOf(HasSubstr("reservoir.lse has"), HasSubstr("geometry asks for")));
  EXPECT_THAT(spoilt([](Reservoir* r) { r->key_tokens[1] = r->key_tokens[0]; }),
              AllOf(HasSubstr("'reservoir.key_tokens': row 1"), HasSubstr("ascend")));
  EXPECT_THAT(spoilt([](Reservoir* r) { r->query_tokens.back().text = 7; }),
              AllOf(HasSubstr("text 7"), HasSubstr("no keys")));
  EXPECT_THAT(spoilt([](Reservoir* r) { r->query_tokens.clear(); }),
              HasSubstr("reservoir.queries has"));
  EXPECT_THAT(spoilt([](Reservoir* r) {
                while (r->key_tokens.size() <= 512) {
                  r->key_tokens.push_back(r->key_tokens.back());
                  ++r->key_tokens.back().position;
                }
                r->keys.resize(size_t{4} * 513 * 32);
                r->values.resize(size_t{4} * 513 * 64);
              }),
              AllOf(HasSubstr("[513, 2]"), HasSubstr("1 to 512 rows")));
  const auto file = FileOf(good);
  EXPECT_THAT(ErrorOf(SplitFile::Of(file).Replace("reservoir.lse", "reservoir.els").Join()),
              HasSubstr("'reservoir.lse' is missing"));
  EXPECT_THAT(ErrorOf(SplitFile::Of(file).Replace("attention_windows", "attention_wlndows").Join()),
              HasSubstr("'attention_windows' is missing"));
}

TEST(StatisticsFileTest, TruncationsAndAbsenceAreRefused) {
  const auto file = FileOf(SmallStatistics());
  for (size_t size = 0; size < file.size(); size += size < 800 ? 1 : 4093) {
    EXPECT_NE(ErrorOf({file.begin(), file.begin() + static_cast<ptrdiff_t>(size)}), "accepted");
  }
  const std::filesystem::path path = std::filesystem::path(testing::TempDir()) / "none.statistics";
  EXPECT_EQ(Statistics::Load(path).status().code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(WriteFileAtomically(path, file).ok());
  EXPECT_TRUE(Statistics::Load(path).ok());
  std::filesystem::resize_file(path, file.size() - 1);
  EXPECT_THAT(std::string(Statistics::Load(path).status().message()),
              AllOf(HasSubstr("none.statistics"), HasSubstr("truncated")));
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace crumb
