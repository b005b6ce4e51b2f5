// SPDX-License-Identifier: Apache-2.0
#include "proto/base/file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

namespace crumb {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class FileTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::path(testing::TempDir()) /
              ("file_test_" + std::to_string(getpid()) + "_" +
               testing::UnitTest::GetInstance()->current_test_info()->name());
    std::filesystem::create_directory(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  size_t NumFiles() const {
    const std::filesystem::directory_iterator files(folder_);
    return static_cast<size_t>(std::distance(begin(files), end(files)));
  }
  std::filesystem::path folder_;
};

std::vector<std::byte> Fill(size_t size, int value) {
  return std::vector<std::byte>(size, static_cast<std::byte>(value));
}

TEST_F(FileTest, WhatWasWrittenIsRead) {
  for (const size_t size : {size_t{0}, size_t{1}, size_t{1} << 20}) {
    ASSERT_TRUE(WriteFileAtomically(folder_ / "a", Fill(size, 7)).ok());
    const auto read = ReadFile(folder_ / "a", size);
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(*read, Fill(size, 7));
  }
  EXPECT_EQ(NumFiles(), 1U);
}

TEST_F(FileTest, ANewFileIsReadableAsTheUmaskSays) {
  const mode_t before = umask(027);
  ASSERT_TRUE(WriteFileAtomically(folder_ / "a", Fill(1, 0)).ok());
  umask(before);
  struct stat info {};
  ASSERT_EQ(stat((folder_ / "a").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777U, 0640U);
}

TEST_F(FileTest, AReaderSeesTheOldBytesOrTheNewOnes) {
  constexpr size_t kBytes = 300'000;
  const auto path = folder_ / "a";
  ASSERT_TRUE(WriteFileAtomically(path, Fill(kBytes, 0)).ok());
  std::atomic<bool> done{false};
  std::thread writer([&] {
    for (int value = 1; value <= 50; ++value) {
      EXPECT_TRUE(WriteFileAtomically(path, Fill(kBytes, value)).ok());
    }
    done = true;
  });
  while (!done) {
    const auto read = ReadFile(path, kBytes);
    ASSERT_TRUE(read.ok()) << read.status();
    ASSERT_EQ(*read, Fill(kBytes, static_cast<int>(read->at(0))));
  }
  writer.join();
  EXPECT_EQ(NumFiles(), 1U);
}

TEST_F(FileTest, AFailedWriteNamesThePathAndLeavesNothing) {
  const auto missing = WriteFileAtomically(folder_ / "no" / "a", Fill(1, 0));
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(missing.message()), HasSubstr("no/a"));

  std::filesystem::create_directory(folder_ / "taken");
  const auto taken = WriteFileAtomically(folder_ / "taken", Fill(1, 0));
  EXPECT_FALSE(taken.ok());
  EXPECT_THAT(std::string(taken.message()), AllOf(HasSubstr("rename"), HasSubstr("taken")));
  EXPECT_EQ(NumFiles(), 1U);
}

TEST_F(FileTest, RefusesWhatIsNotAFileOfAtMostSoManyBytes) {
  EXPECT_EQ(ReadFile(folder_ / "a", 10).status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(ReadFile(folder_, 10).status().message()),
              HasSubstr("not a regular file"));
  // Nobody writes to it: a reader that waited would wait for ever.
  ASSERT_EQ(mkfifo((folder_ / "fifo").c_str(), 0600), 0);
  EXPECT_THAT(std::string(ReadFile(folder_ / "fifo", 10).status().message()),
              HasSubstr("not a regular file"));
  ASSERT_TRUE(WriteFileAtomically(folder_ / "a", Fill(11, 0)).ok());
  EXPECT_THAT(std::string(ReadFile(folder_ / "a", 10).status().message()),
              AllOf(HasSubstr("has 11 bytes"), HasSubstr("at most 10")));
  EXPECT_TRUE(ReadFile(folder_ / "a", 11).ok());
}

TEST_F(FileTest, TextIsReadToItsEndFromFilesPipesAndDevices) {
  std::ofstream(folder_ / "a") << std::string(200'000, 'x') << "end";
  EXPECT_EQ(ReadText(folder_ / "a", 1 << 20).value_or(""), std::string(200'000, 'x') + "end");
  EXPECT_EQ(ReadText("/dev/null", 0).value_or("an error"), "");
  ASSERT_EQ(mkfifo((folder_ / "fifo").c_str(), 0600), 0);
  std::thread writer([&] { std::ofstream(folder_ / "fifo") << "through a pipe"; });
  EXPECT_EQ(ReadText(folder_ / "fifo", 14).value_or(""), "through a pipe");
  writer.join();
}

TEST_F(FileTest, TextThatCannotBeReadOrHasNoEndIsNamed) {
  EXPECT_EQ(ReadText(folder_ / "a", 10).status().code(), absl::StatusCode::kNotFound);
  const auto folder = ReadText(folder_, 10);
  EXPECT_EQ(folder.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(folder.status().message()),
              AllOf(HasSubstr(folder_.string()), HasSubstr("is a folder")));
  const auto endless = ReadText("/dev/zero", 100'000);
  EXPECT_EQ(endless.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(endless.status().message()),
              AllOf(HasSubstr("/dev/zero"), HasSubstr("100000 bytes")));
}

}  // namespace
}  // namespace crumb
