// SPDX-License-Identifier: Apache-2.0
//
// A fuzzer for every build: valid files, spoilt at random for a bounded number of rounds. Repeat a
// failure with CRUMB_TEST_SEED set to the seed that was printed.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <iostream>
#include <random>
#include <string>

#include "tests/cuda/profile/profile_parts.h"
#include "tests/fuzz/fuzz_subject.h"

namespace crumb {
namespace {

constexpr int kRounds = 4000;

uint32_t Seed() {
  const char* wish = std::getenv("CRUMB_TEST_SEED");  // NOLINT(concurrency-mt-unsafe)
  return wish == nullptr ? 20'260'101 : static_cast<uint32_t>(std::stoul(wish));
}

class Mutator {
 public:
  explicit Mutator(uint32_t seed) : random_(seed) {}

  size_t Below(size_t limit) { return random_() % limit; }

  // One of the ways in which a file may be bad, each about as likely.
  std::vector<std::byte> Spoil(const std::vector<std::byte>& file) {
    SplitFile split = SplitFile::Of(file);
    switch (Below(6)) {
      case 0:
        SpoilText(&split.header);
        return split.Join();
      case 1:
        SpoilNumber(&split.header);
        return split.Join();
      case 2:
        SpoilWord(&split.header);
        return split.Join();
      case 3:
        return split.JoinWithLength(OddLength(split.header.size()));
      case 4:
        SpoilData(&split.data);
        return split.Join();
      default:
        return Resize(file);
    }
  }

 private:
  void SpoilText(std::string* text) {
    const size_t at = Below(text->size());
    switch (Below(4)) {
      case 0:
        (*text)[at] = static_cast<char>(random_());
        break;
      case 1:
        text->erase(at, 1 + Below(8));
        break;
      case 2:
        text->insert(at, 1, "{}[]\",:0e-"[Below(10)]);
        break;
      default:
        text->insert(at, text->substr(Below(text->size()), Below(200)));
        break;
    }
  }

  // A whole number becomes another one that is likely to be trouble.
  void SpoilNumber(std::string* text) {
    const char* numbers[] = {"0",          "1",          "63",         "65",
                             "4294967295", "4294967296", "2147483648", "18446744073709551615",
                             "1e3",        "-1",         "0.5",        "18446744073709551616"};
    size_t at = text->find_first_of("0123456789", Below(text->size()));
    if (at == std::string::npos) {
      at = text->find_first_of("0123456789");
    }
    const size_t end = text->find_first_not_of("0123456789", at);
    text->replace(at, end - at, numbers[Below(std::size(numbers))]);
  }

  // A word of the format becomes another.
  void SpoilWord(std::string* text) {
    const char* words[] = {"F32",
                           "F64",
                           "BF16",
                           "shape",
                           "dtype",
                           "data_offsets",
                           "key_clip",
                           "value_clip",
                           "key_mean",
                           "key_moment",
                           "query_mean",
                           "__metadata__",
                           "num_layers",
                           "oscar-int2",
                           "oscar-int2-lm",
                           "oscar-int2-aware",
                           "oscar-int2-tilted",
                           "crumb.profile.v1",
                           "crumb.statistics.v2"};
    const std::string from = words[Below(std::size(words))];
    if (const size_t at = text->find(from); at != std::string::npos) {
      text->replace(at, from.size(), words[Below(std::size(words))]);
    }
  }

  void SpoilData(std::vector<std::byte>* data) {
    const uint32_t floats[] = {0x7fc00000,
                               0x7f800000,
                               0xff800000,
                               0x7f7fffff,
                               0,
                               0xbf800000,
                               static_cast<uint32_t>(random_())};
    const size_t at = Below(data->size() / 4) * 4;
    std::memcpy(data->data() + at, &floats[Below(std::size(floats))], 4);
  }

  uint64_t OddLength(uint64_t length) {
    const uint64_t lengths[] = {0,          1,          length - 1, length + 1,
                                length * 2, 1ULL << 20, 1ULL << 32, (1ULL << 63) + length,
                                ~0ULL,      ~7ULL};
    return lengths[Below(std::size(lengths))];
  }

  std::vector<std::byte> Resize(std::vector<std::byte> file) {
    file.resize(Below(4) == 0 ? file.size() + 1 + Below(64) : Below(file.size()));
    return file;
  }

  std::mt19937 random_;
};

TEST(ProfileMutationTest, TheSeedsAreAccepted) {
  for (const FuzzSeed& seed : FuzzSeeds()) {
    EXPECT_TRUE(FuzzOne(seed.file)) << seed.name;
  }
}

TEST(ProfileMutationTest, SpoiltFilesAreRefusedByNameOrHarmless) {
  const uint32_t seed = Seed();
  std::cout << "CRUMB_TEST_SEED=" << seed << "\n";
  Mutator mutator(seed);
  const std::vector<FuzzSeed> seeds = FuzzSeeds();
  int accepted = 0;
  for (int round = 0; round < kRounds; ++round) {
    std::vector<std::byte> file = seeds[mutator.Below(seeds.size())].file;
    file = mutator.Spoil(file);
    accepted += FuzzOne(file) ? 1 : 0;
  }
  // Most mutations must bite; a few (another clip ratio, a longer name) leave a valid file.
  EXPECT_LT(accepted, kRounds / 4);
  EXPECT_GT(accepted, 0);
}

}  // namespace
}  // namespace crumb
