// SPDX-License-Identifier: Apache-2.0
//
// Starting and stopping real daemons: what an operator, or systemd, sees.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <csignal>
#include <cstring>
#include <fstream>
#include <string>

#include "proto/base/unique_fd.h"
#include "proto/base/version.h"
#include "tests/support/daemon_process.h"

namespace crumb {
namespace {

using testing::HasSubstr;

std::unique_ptr<DaemonProcess> StartDaemon(DaemonProcessOptions options = {}) {
  auto daemon = DaemonProcess::Start(std::move(options));
  EXPECT_TRUE(daemon.ok()) << daemon.status();
  return daemon.ok() ? *std::move(daemon) : nullptr;
}

ProgramResult Ctl(const DaemonProcess& daemon, std::vector<std::string> arguments) {
  arguments.push_back("--address=" + daemon.address());
  return RunProgram("crumbctl", arguments);
}

mode_t ModeOf(const std::filesystem::path& path) {
  struct stat info {};
  EXPECT_EQ(stat(path.c_str(), &info), 0) << path;
  return info.st_mode & 0777;
}

TEST(DaemonLifecycleTest, SigtermDrainsAndLeavesNoSocket) {
  const auto daemon = StartDaemon();
  ASSERT_NE(daemon, nullptr);
  EXPECT_EQ(Ctl(*daemon, {"status"}).exit_status, 0);
  const auto status = daemon->Stop();
  ASSERT_TRUE(status.ok()) << status.status();
  EXPECT_EQ(*status, 0);
  EXPECT_FALSE(std::filesystem::exists(daemon->socket_path()));
  EXPECT_FALSE(std::filesystem::exists(daemon->socket_path().string() + ".mem"));
  EXPECT_THAT(daemon->Log(), HasSubstr("draining"));
  EXPECT_THAT(daemon->Log(), HasSubstr("stopped"));
}

TEST(DaemonLifecycleTest, SigintIsAsGoodAsSigterm) {
  const auto daemon = StartDaemon();
  ASSERT_NE(daemon, nullptr);
  daemon->Signal(SIGINT);
  const auto status = daemon->Wait(absl::Seconds(30));
  ASSERT_TRUE(status.ok()) << status.status();
  EXPECT_EQ(*status, 0);
}

TEST(DaemonLifecycleTest, SocketsHaveTheConfiguredMode) {
  const auto daemon = StartDaemon({.flags = {"--listen.unix_socket_mode=0600"}});
  ASSERT_NE(daemon, nullptr);
  EXPECT_EQ(ModeOf(daemon->socket_path()), 0600u);
  EXPECT_EQ(ModeOf(daemon->socket_path().string() + ".mem"), 0600u);
  const auto by_default = StartDaemon();
  ASSERT_NE(by_default, nullptr);
  EXPECT_EQ(ModeOf(by_default->socket_path()), 0660u);
}

TEST(DaemonLifecycleTest, AStaleSocketIsReplaced) {
  auto first = StartDaemon();
  ASSERT_NE(first, nullptr);
  first->Kill();
  EXPECT_TRUE(std::filesystem::exists(first->socket_path())) << "the kill left its socket";
  const auto second = StartDaemon({.directory = first->directory()});
  ASSERT_NE(second, nullptr);
  EXPECT_EQ(Ctl(*second, {"status"}).exit_status, 0);
}

TEST(DaemonLifecycleTest, ASocketInUseIsRefusedAndItsOwnerServesOn) {
  const auto daemon = StartDaemon();
  ASSERT_NE(daemon, nullptr);
  const ProgramResult second = RunProgram(
      "crumbd",
      {"--listen.unix_socket=" + daemon->socket_path().string(), "--listen.metrics=none"});
  EXPECT_EQ(second.exit_status, 1);
  EXPECT_THAT(second.err,
              HasSubstr("another crumbd is listening on " + daemon->socket_path().string()));
  EXPECT_THAT(second.err, HasSubstr("unix_socket"));
  EXPECT_EQ(Ctl(*daemon, {"status"}).exit_status, 0);
}

TEST(DaemonLifecycleTest, ASocketOfAnotherProgramIsNotTaken) {
  const auto other = StartDaemon();
  ASSERT_NE(other, nullptr);
  const std::string path = (other->directory() / "other.sock").string();
  const UniqueFd listener(socket(AF_UNIX, SOCK_STREAM, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  ASSERT_EQ(bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(listen(listener.get(), 1), 0);
  const ProgramResult result =
      RunProgram("crumbd", {"--listen.unix_socket=" + path, "--listen.metrics=none"});
  EXPECT_EQ(result.exit_status, 1);
  EXPECT_THAT(result.err, HasSubstr("is listening on " + path));
  EXPECT_TRUE(std::filesystem::exists(path));
}

TEST(DaemonLifecycleTest, AFileThatIsNoSocketIsNotRemoved) {
  const auto other = StartDaemon();
  ASSERT_NE(other, nullptr);
  const std::string path = (other->directory() / "precious").string();
  std::ofstream(path) << "keep me";
  const ProgramResult result =
      RunProgram("crumbd", {"--listen.unix_socket=" + path, "--listen.metrics=none"});
  EXPECT_EQ(result.exit_status, 1);
  EXPECT_THAT(result.err, HasSubstr("is no socket"));
  EXPECT_TRUE(std::filesystem::exists(path));
}

TEST(DaemonLifecycleTest, AMissingDirectoryIsNamedWithItsRemedy) {
  const ProgramResult result = RunProgram(
      "crumbd", {"--listen.unix_socket=/nowhere/at/all/c.sock", "--listen.metrics=none"});
  EXPECT_EQ(result.exit_status, 1);
  EXPECT_THAT(result.err, HasSubstr("/nowhere/at/all"));
  EXPECT_THAT(result.err, HasSubstr("RuntimeDirectory"));
}

TEST(DaemonLifecycleTest, AMetricsPortInUseIsNamed) {
  const auto daemon = StartDaemon();
  ASSERT_NE(daemon, nullptr);
  const int port = daemon->ReadyNumber("metrics_port");
  ASSERT_GT(port, 0);
  const std::string address = "127.0.0.1:" + std::to_string(port);
  const ProgramResult result =
      RunProgram("crumbd", {"--listen.unix_socket=" + (daemon->directory() / "b.sock").string(),
                            "--listen.metrics=" + address});
  EXPECT_EQ(result.exit_status, 1);
  EXPECT_THAT(result.err, HasSubstr(address));
  EXPECT_THAT(result.err, HasSubstr("[listen] metrics"));
}

TEST(DaemonLifecycleTest, ATcpPortInUseIsNamed) {
  const auto daemon = StartDaemon({.flags = {"--listen.tcp=127.0.0.1:0"}});
  ASSERT_NE(daemon, nullptr);
  // Of another service, and of another crumbd, which could share it.
  for (const char* port : {"metrics_port", "tcp_port"}) {
    const std::string address = "127.0.0.1:" + std::to_string(daemon->ReadyNumber(port));
    const ProgramResult result =
        RunProgram("crumbd", {"--listen.unix_socket=" + (daemon->directory() / "b.sock").string(),
                              "--listen.metrics=none", "--listen.tcp=" + address});
    EXPECT_EQ(result.exit_status, 1) << port;
    EXPECT_THAT(result.err, HasSubstr(address));
    EXPECT_THAT(result.err, HasSubstr("[listen] tcp"));
  }
}

TEST(DaemonLifecycleTest, AUcxPortInUseIsNamed) {
  const auto daemon = StartDaemon();
  ASSERT_NE(daemon, nullptr);
  const std::string port = std::to_string(daemon->ReadyNumber("metrics_port"));
  const ProgramResult result =
      RunProgram("crumbd", {"--listen.unix_socket=" + (daemon->directory() / "b.sock").string(),
                            "--listen.metrics=none", "--ucx.enabled=true", "--ucx.port=" + port});
  EXPECT_EQ(result.exit_status, 1);
  EXPECT_THAT(result.err, HasSubstr("127.0.0.1:" + port));
  EXPECT_THAT(result.err, HasSubstr("in [ucx]"));
  EXPECT_FALSE(std::filesystem::exists(daemon->directory() / "b.sock"));
}

TEST(DaemonLifecycleTest, UcxTransportsThatAreNoneAreNamed) {
  const auto daemon = StartDaemon();
  ASSERT_NE(daemon, nullptr);
  const ProgramResult result = RunProgram(
      "crumbd", {"--listen.unix_socket=" + (daemon->directory() / "b.sock").string(),
                 "--listen.metrics=none", "--ucx.enabled=true", "--ucx.transports=carrier-pigeon"});
  EXPECT_EQ(result.exit_status, 1);
  EXPECT_THAT(result.err, HasSubstr("carrier-pigeon"));
  EXPECT_THAT(result.err, HasSubstr("in [ucx]"));
}

TEST(DaemonLifecycleTest, WrongArgumentsAreStatusTwo) {
  ProgramResult result = RunProgram("crumbd", {"--store.capcity=4GiB"});
  EXPECT_EQ(result.exit_status, 2);
  EXPECT_THAT(result.err, HasSubstr("did you mean --store.capacity?"));
  result = RunProgram("crumbd", {"--listen.tcp=0.0.0.0:7070"});
  EXPECT_EQ(result.exit_status, 2);
  EXPECT_THAT(result.err, HasSubstr("listen.insecure = true"));
  result = RunProgram("crumbd", {"--store.lease=1ns", "--check-config"});
  EXPECT_EQ(result.exit_status, 2);
  EXPECT_THAT(result.err, HasSubstr("--store.lease: \"1ns\" is no time from 100ms to 24h"));
}

TEST(DaemonLifecycleTest, VersionHelpAndPrintedConfiguration) {
  EXPECT_EQ(RunProgram("crumbd", {"--version"}).out, std::string("crumbd ") + kCrumbVersion + "\n");
  const ProgramResult help = RunProgram("crumbd", {"--help"});
  EXPECT_EQ(help.exit_status, 0);
  EXPECT_THAT(help.out, HasSubstr("--store.capacity"));
  const ProgramResult printed = RunProgram("crumbd", {"--print-config", "--store.capacity=1GiB"});
  EXPECT_EQ(printed.exit_status, 0);
  EXPECT_THAT(printed.out, HasSubstr("capacity = \"1GiB\""));
  EXPECT_EQ(RunProgram("crumbd", {"--check-config"}).exit_status, 0);
}

TEST(DaemonLifecycleTest, TheToolSaysWhereItLookedForAnAbsentDaemon) {
  const ProgramResult result =
      RunProgram("crumbctl", {"--address=unix:/nowhere/crumbd.sock", "status"});
  EXPECT_EQ(result.exit_status, 1);
  EXPECT_THAT(result.err, HasSubstr("no crumbd answers at unix:/nowhere/crumbd.sock"));
  EXPECT_THAT(result.err, HasSubstr("CRUMB_ADDRESS"));
}

}  // namespace
}  // namespace crumb
