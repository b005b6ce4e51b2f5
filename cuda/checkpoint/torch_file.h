// SPDX-License-Identifier: Apache-2.0
//
// A file of torch.save (PyTorch 1.6 and later), read without PyTorch and without executing
// anything.
//
//   {root}/version     "3"             {root}/byteorder   "little", since PyTorch 2.1
//   {root}/data.pkl    the pickle      {root}/data/{key}  a storage's elements
//
// Immutable; Thread-safe.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

#include "cuda/checkpoint/pickle.h"
#include "cuda/checkpoint/zip_entries.h"

namespace crumb::checkpoint {

class TorchFile {
 public:
  static constexpr size_t kMaxFileBytes = size_t{1} << 30;

  // INVALID_ARGUMENT names the entry and what was expected: see ReadStoredEntries and ParsePickle;
  // also no or more than one data.pkl, another version or byte order.
  static absl::StatusOr<TorchFile> Parse(std::span<const std::byte> file);
  static absl::StatusOr<TorchFile> FromEntries(ZipEntries entries);

  const PickleTree& tree() const { return tree_; }

  // The tensor's elements, row-major. INVALID_ARGUMENT, beginning with `what`: a storage that is
  // missing or has other bytes than the pickle says, a view that leaves its storage or has more
  // elements than it, NaN or infinity.
  absl::StatusOr<std::vector<float>> Floats(const PickleTensor& tensor,
                                            std::string_view what) const;

 private:
  TorchFile(std::string root, ZipEntries entries, PickleTree tree)
      : root_(std::move(root)), entries_(std::move(entries)), tree_(std::move(tree)) {}

  std::string root_;  // With its slash.
  ZipEntries entries_;
  PickleTree tree_;
};

}  // namespace crumb::checkpoint
