// SPDX-License-Identifier: Apache-2.0
//
// Rotation checkpoints: whole torch.save files and, since most changes to one break a CRC, pickles
// alone, which are read as the pickle of a file with the right storages.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "cuda/checkpoint/rotation_checkpoint.h"
#include "proto/base/file.h"
#include "proto/page/geometry.h"
#include "tests/fuzz/fuzz_subject.h"

namespace crumb {
namespace {

using checkpoint::RotationCheckpoint;
using checkpoint::TorchFile;

constexpr size_t kMaxSeedBytes = size_t{1} << 20;

[[noreturn]] void Fail(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

std::vector<std::byte> ReadOrFail(const std::string& name) {
  auto bytes = ReadFile(std::string(CRUMB_TORCH_FIXTURES "/") + name, kMaxSeedBytes);
  if (!bytes.ok()) {
    Fail(std::string(bytes.status().message()).c_str());
  }
  return *std::move(bytes);
}

bool IsZip(std::span<const std::byte> input) {
  return input.size() >= 2 && input[0] == std::byte{'P'} && input[1] == std::byte{'K'};
}

// A file of this pickle, and of the storages that the seeds' pickles name.
absl::StatusOr<TorchFile> FileOf(std::span<const std::byte> pickle) {
  static const checkpoint::ZipEntries* const kStorages = [] {
    auto entries = checkpoint::ReadStoredEntries(ReadOrFail("v2_keys.pt"));
    if (!entries.ok()) {
      Fail("v2_keys.pt is no archive");
    }
    return new checkpoint::ZipEntries(*std::move(entries));
  }();
  checkpoint::ZipEntries entries = *kStorages;
  entries["archive/data.pkl"] = {pickle.begin(), pickle.end()};
  return TorchFile::FromEntries(std::move(entries));
}

void CheckAccepted(const RotationCheckpoint& accepted) {
  const size_t matrix = size_t{accepted.dim} * accepted.dim;
  if (!IsValidHeadDim(accepted.dim) || accepted.num_heads < 1 ||
      accepted.num_heads > Geometry::kMaxKvHeads || accepted.layer_ids.empty() ||
      accepted.rotations.size() != accepted.layer_ids.size() * accepted.num_heads * matrix) {
    Fail("a checkpoint was accepted whose rotations do not fit its shape");
  }
  for (const float x : accepted.rotations) {
    if (!std::isfinite(x)) {
      Fail("a rotation that is not finite was accepted");
    }
  }
}

}  // namespace

std::vector<FuzzSeed> FuzzSeeds() {
  std::vector<FuzzSeed> seeds;
  for (const char* name : {"v2_keys.pkl", "v1_keys.pt"}) {
    seeds.push_back({name, ReadOrFail(name)});
  }
  return seeds;
}

bool FuzzOne(std::span<const std::byte> input) {
  const absl::StatusOr<TorchFile> file = IsZip(input) ? TorchFile::Parse(input) : FileOf(input);
  const absl::StatusOr<RotationCheckpoint> read =
      file.ok() ? checkpoint::ReadRotationCheckpoint(*file) : file.status();
  if (read.ok()) {
    CheckAccepted(*read);
  } else if (read.status().message().empty()) {
    Fail("refused without a message");
  }
  return read.ok();
}

}  // namespace crumb
