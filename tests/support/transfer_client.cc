// SPDX-License-Identifier: Apache-2.0
//
// An engine that does nothing but pull one prefix again and again, for tests that stop or kill it.
//
//   transfer_client TRANSPORTS PORT VERSION LAYERS HEADS DIM SINK_PAGES SALT PULLS
//
// Reads transfer_daemon's answers to `session` and `lookup` from standard input. Writes "first"
// when the first layer of a pull is there, and at its end "right", "wrong" (validated, but the
// bytes are not what was published: must never be) or "error CODE MESSAGE".
#include <sys/prctl.h>

#include <csignal>
#include <iostream>
#include <string>

#include "client/transport/ucx_transport.h"
#include "tests/support/transfer_pages.h"
#include "tests/support/transfer_process.h"

namespace crumb::testing {
namespace {

int Run(int argc, char** argv) {
  if (argc != 10) {
    std::cerr << "nine arguments, not " << argc - 1 << "\n";
    return 2;
  }
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const auto number = [&](int argument) {
    return static_cast<uint32_t>(std::stoul(argv[argument]));
  };
  const Geometry geometry{number(4), number(5), number(6), number(6)};
  std::string line;
  std::getline(std::cin, line);
  const SessionInfo session = ParseSession(line, static_cast<uint16_t>(number(2)), argv[3],
                                           MakeTransferProfile(geometry, number(7)));
  std::getline(std::cin, line);
  const LeasedPrefix prefix = ParseLookup(line, session);
  UcxTransportOptions options;
  options.ucx.transports = argv[1];
  const auto deadline = [] { return Clock::System().Now() + absl::Seconds(20); };
  auto transport = ConnectUcxWithOptions(options, session, deadline());
  if (!transport.ok()) {
    std::cout << "error " << transport.status() << std::endl;
    return 1;
  }
  for (uint32_t pull = 0; pull < number(9); ++pull) {
    auto source = (*transport)->Open(prefix, deadline());
    absl::Status status = source.status();
    if (status.ok()) {
      status = (*source)->WaitForLayer(0);
    }
    if (status.ok()) {
      std::cout << "first" << std::endl;
      status = (*source)->Validate();
    }
    if (!status.ok()) {
      std::cout << "error " << status << std::endl;
    } else {
      const size_t wrong = CountWrongBlocks(**source, session, prefix, number(8));
      std::cout << (wrong == 0 ? "right" : "wrong") << std::endl;
    }
  }
  return 0;
}

}  // namespace
}  // namespace crumb::testing

int main(int argc, char** argv) {
  return crumb::testing::Run(argc, argv);
}
