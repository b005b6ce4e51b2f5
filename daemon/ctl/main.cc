// SPDX-License-Identifier: Apache-2.0
#include <iostream>

#include "daemon/ctl/commands.h"

int main(int argc, char** argv) {
  return crumb::RunCrumbctl(argc, argv, std::cout, std::cerr);
}
