// SPDX-License-Identifier: Apache-2.0
#include "client/session/daemon_channel.h"

#include <grpcpp/create_channel_posix.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <utility>

#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

#include "proto/base/unique_fd.h"

namespace crumb {
namespace {

// A page table of a prompt of 1,048,576 tokens has 256 KB of INT2, and less of BF16.
constexpr int kMaxReplyBytes = 16 << 20;

// A connection to the socket of "unix:/path"; invalid if there is none to be had.
UniqueFd ConnectUnix(absl::string_view address) {
  // Holds a prompt of 250,000 tokens. In the system's own buffer of some 200 KB a long one does not
  // fit, and waits for the daemon to read half of it. The system may grant less; nothing breaks.
  constexpr int kSendBufferBytes = 1 << 20;
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  if (!absl::ConsumePrefix(&address, "unix:") || address.size() >= sizeof(name.sun_path)) {
    return {};
  }
  std::copy(address.begin(), address.end(), name.sun_path);
  UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  ::setsockopt(socket.get(), SOL_SOCKET, SO_SNDBUF, &kSendBufferBytes, sizeof(kSendBufferBytes));
  const bool is_connected =
      ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&name), sizeof(name)) == 0;
  return is_connected ? std::move(socket) : UniqueFd();
}

}  // namespace

// shared: the header says by whom.
std::shared_ptr<grpc::Channel> ConnectToDaemon(const std::string& address) {
  grpc::ChannelArguments arguments;
  // A channel of its own for each attempt to attach: no back-off of earlier ones stands in the way.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetMaxReceiveMessageSize(kMaxReplyBytes);
  if (UniqueFd socket = ConnectUnix(address); socket.is_valid()) {
    return grpc::CreateCustomInsecureChannelFromFd("crumbd", socket.release(), arguments);
  }
  // Over TCP; or to a socket where no one listens, which the channel's calls will then say.
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

}  // namespace crumb
