// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

namespace crumb {

// A connection to crumbd at "unix:/path" or "host:port". To an address where no one listens it is
// made too, and its calls fail with UNAVAILABLE. One that broke stays broken: make another.
// shared: gRPC's way of handing out channels.
std::shared_ptr<grpc::Channel> ConnectToDaemon(const std::string& address);

}  // namespace crumb
