// SPDX-License-Identifier: Apache-2.0
//
// A fuzzer for every build, for inputs without text: valid ones, spoilt at random for a bounded
// number of rounds. Repeat a failure with CRUMB_TEST_SEED set to the seed that was printed.
#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>
#include <random>
#include <string>

#include "tests/fuzz/fuzz_subject.h"

namespace crumb {
namespace {

constexpr int kRounds = 50'000;

uint32_t RandomSeed() {
  const char* wish = std::getenv("CRUMB_TEST_SEED");  // NOLINT(concurrency-mt-unsafe)
  return wish == nullptr ? 20'260'101 : static_cast<uint32_t>(std::stoul(wish));
}

void Spoil(std::vector<std::byte>* file, std::mt19937* random) {
  const auto below = [&](size_t limit) { return (*random)() % limit; };
  const uint8_t values[] = {0, 1, 0x7f, 0x80, 0xff, static_cast<uint8_t>((*random)())};
  switch (below(8)) {
    case 0:
      file->resize(below(file->size()) + 1);
      break;
    case 1:
      file->resize(file->size() + 1 + below(16));
      break;
    case 2:  // A whole field.
      for (size_t at = below(file->size()) / 4 * 4, end = at + 4; at < end && at < file->size();
           ++at) {
        (*file)[at] = std::byte{0xff};
      }
      break;
    default:
      (*file)[below(file->size())] = static_cast<std::byte>(values[below(std::size(values))]);
      break;
  }
}

TEST(BytesMutationTest, TheSeedsAreAccepted) {
  for (const FuzzSeed& seed : FuzzSeeds()) {
    EXPECT_TRUE(FuzzOne(seed.file)) << seed.name;
  }
}

TEST(BytesMutationTest, SpoiltInputIsRefusedOrHarmless) {
  const uint32_t random_seed = RandomSeed();
  std::cout << "CRUMB_TEST_SEED=" << random_seed << "\n";
  std::mt19937 random(random_seed);
  const std::vector<FuzzSeed> seeds = FuzzSeeds();
  int refused = 0;
  for (int round = 0; round < kRounds; ++round) {
    std::vector<std::byte> file = seeds[random() % seeds.size()].file;
    for (size_t times = 1 + random() % 3; times > 0; --times) {
      Spoil(&file, &random);
    }
    refused += FuzzOne(file) ? 0 : 1;
  }
  EXPECT_GT(refused, kRounds / 10);  // The mutations bite.
}

}  // namespace
}  // namespace crumb
