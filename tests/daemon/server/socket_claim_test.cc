// SPDX-License-Identifier: Apache-2.0
#include "daemon/server/socket_claim.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace crumb {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class SocketClaimTest : public testing::Test {
 protected:
  SocketClaimTest() { std::filesystem::create_directory(directory_); }
  ~SocketClaimTest() override { std::filesystem::remove_all(directory_); }

  // A bound socket's file. Whoever drops the descriptor leaves the file behind, as a crash does.
  static UniqueFd Bind(const std::string& path, int type, bool listens) {
    UniqueFd fd(socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
    EXPECT_EQ(bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    if (listens) {
      EXPECT_EQ(listen(fd.get(), 1), 0);
    }
    return fd;
  }
  // The message with which Take refuses `path`.
  static std::string Refusal(const std::string& path) {
    const auto claim = SocketClaim::Take(path);
    EXPECT_EQ(claim.status().code(), absl::StatusCode::kFailedPrecondition);
    return std::string(claim.status().message());
  }

  const std::filesystem::path directory_ =
      std::filesystem::path(testing::TempDir()) / absl::StrCat("socket_claim.", getpid());
  const std::string path_ = directory_ / "crumbd.sock";
};

TEST_F(SocketClaimTest, OneDaemonHasThePathUntilItLetsGo) {
  std::optional<absl::StatusOr<SocketClaim>> first = SocketClaim::Take(path_);
  ASSERT_TRUE(first->ok()) << first->status();
  EXPECT_THAT(Refusal(path_), AllOf(HasSubstr("another crumbd"), HasSubstr(path_),
                                    HasSubstr("[listen] unix_socket")));
  EXPECT_TRUE(SocketClaim::Take(directory_ / "other.sock").ok());
  first.reset();
  EXPECT_TRUE(SocketClaim::Take(path_).ok());
}

TEST_F(SocketClaimTest, DeadHolderLosesThePathWithoutCleaningUp) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const auto claim = SocketClaim::Take(path_);
    const UniqueFd control = Bind(path_, SOCK_STREAM, true);
    const UniqueFd memory = Bind(path_ + ".mem", SOCK_SEQPACKET, true);
    _exit(claim.ok() ? 0 : 1);  // Nothing is unlinked, as after SIGKILL.
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
  ASSERT_TRUE(std::filesystem::exists(path_));
  ASSERT_TRUE(std::filesystem::exists(path_ + ".mem"));
  ASSERT_TRUE(SocketClaim::Take(path_).ok());
  EXPECT_FALSE(std::filesystem::exists(path_));
  EXPECT_FALSE(std::filesystem::exists(path_ + ".mem"));
}

TEST_F(SocketClaimTest, LiveSocketIsNotRemovedEvenWithoutALock) {
  const UniqueFd control = Bind(path_, SOCK_STREAM, true);
  EXPECT_THAT(Refusal(path_), HasSubstr("another crumbd is listening on " + path_));
  EXPECT_TRUE(std::filesystem::exists(path_));
}

TEST_F(SocketClaimTest, LiveMemorySocketIsNotRemovedEither) {
  const UniqueFd memory = Bind(path_ + ".mem", SOCK_SEQPACKET, true);
  EXPECT_THAT(Refusal(path_), HasSubstr(path_ + ".mem"));
  EXPECT_TRUE(std::filesystem::exists(path_ + ".mem"));
}

TEST_F(SocketClaimTest, RefusedClaimLeavesThePathFree) {
  {
    const UniqueFd control = Bind(path_, SOCK_STREAM, true);
    Refusal(path_);
  }
  EXPECT_TRUE(SocketClaim::Take(path_).ok());
}

TEST_F(SocketClaimTest, FileThatIsNoSocketIsKept) {
  std::ofstream(path_) << "precious";
  EXPECT_THAT(Refusal(path_), AllOf(HasSubstr(path_), HasSubstr("no socket")));
  EXPECT_EQ(std::filesystem::file_size(path_), 8u);
}

TEST_F(SocketClaimTest, LinkIsNotFollowed) {
  const std::string target = directory_ / "target.sock";
  Bind(target, SOCK_STREAM, false);
  std::filesystem::create_symlink(target, path_);
  EXPECT_THAT(Refusal(path_), HasSubstr("no socket"));
  EXPECT_TRUE(std::filesystem::exists(target));
}

TEST_F(SocketClaimTest, MissingDirectoryIsNamedWithTheRemedy) {
  EXPECT_THAT(Refusal(directory_ / "none" / "crumbd.sock"),
              AllOf(HasSubstr((directory_ / "none").string()), HasSubstr("create it")));
}

TEST_F(SocketClaimTest, UnwritableDirectoryIsNamed) {
  std::filesystem::permissions(directory_, std::filesystem::perms(0555));
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    constexpr uid_t kNobody = 65534;
    if (geteuid() == 0 && setresuid(kNobody, kNobody, kNobody) != 0) {
      _exit(2);  // Root may write anywhere, and this one cannot become another.
    }
    const std::string message(SocketClaim::Take(path_).status().message());
    const bool is_named = message.find(directory_.string()) != std::string::npos &&
                          message.find("not writable") != std::string::npos;
    _exit(is_named ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  std::filesystem::permissions(directory_, std::filesystem::perms(0755));
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) == 2) {
    GTEST_SKIP() << "this root may not become another user";
  }
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST_F(SocketClaimTest, PathTooLongForASocketIsRefusedWithBothLengths) {
  const std::string path =
      absl::StrCat("/tmp/", std::string(103, 'x'));  // 108 bytes, 112 with .mem.
  EXPECT_THAT(Refusal(path), AllOf(HasSubstr("112 bytes"), HasSubstr("107")));
}

}  // namespace
}  // namespace crumb
