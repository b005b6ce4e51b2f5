// SPDX-License-Identifier: Apache-2.0
//
// libFuzzer's entry to the subject that it is linked with. With --seeds FOLDER as the first
// argument it writes the seeds there, for a corpus to start from, and ends.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "proto/base/file.h"
#include "tests/fuzz/fuzz_subject.h"

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  if (*argc != 3 || std::strcmp((*argv)[1], "--seeds") != 0) {
    return 0;
  }
  const std::filesystem::path folder = (*argv)[2];
  std::filesystem::create_directories(folder);
  for (const crumb::FuzzSeed& seed : crumb::FuzzSeeds()) {
    const absl::Status status = crumb::WriteFileAtomically(folder / seed.name, seed.file);
    if (!status.ok()) {
      std::fprintf(stderr, "%s\n", status.ToString().c_str());
      std::exit(1);  // NOLINT(concurrency-mt-unsafe)
    }
  }
  std::exit(0);  // NOLINT(concurrency-mt-unsafe)
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  crumb::FuzzOne(std::as_bytes(std::span(data, size)));
  return 0;
}
