// SPDX-License-Identifier: Apache-2.0
//
// What is fuzzed: seeds to start from, and what must hold of any input. One *_subject.cc a kind of
// input defines these; each fuzzer and mutation test links one.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace crumb {

struct FuzzSeed {
  std::string name;
  std::vector<std::byte> file;
};

// Valid inputs of each kind, small, since most mutations should hit the header.
std::vector<FuzzSeed> FuzzSeeds();

// Gives the input to each reader. Aborts, with a message, when one accepts what its contract
// forbids or refuses without saying why. Whether any reader accepted it.
bool FuzzOne(std::span<const std::byte> input);

}  // namespace crumb
