// SPDX-License-Identifier: Apache-2.0
#include "cuda/checkpoint/torch_file.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"

#include "cuda/profile/safetensors.h"
#include "proto/base/status_macros.h"

namespace crumb::checkpoint {
namespace {

static_assert(std::endian::native == std::endian::little, "storages are read as they are");

constexpr char kPickleName[] = "data.pkl";

template <typename... Parts>
absl::Status Refuse(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts...));
}

// "archive/" of the one "archive/data.pkl".
absl::StatusOr<std::string> FindRoot(const ZipEntries& entries) {
  std::optional<std::string> root;
  for (const auto& [name, bytes] : entries) {
    const size_t slash = name.find('/');
    if (slash == std::string::npos || name.substr(slash + 1) != kPickleName) {
      continue;
    }
    if (root.has_value()) {
      return Refuse("torch file: '", Printable(*root), kPickleName, "' and '", Printable(name),
                    "' are both there; one is expected");
    }
    root = name.substr(0, slash + 1);
  }
  if (!root.has_value()) {
    return Refuse("torch file: none of the ", entries.size(),
                  " entries is a data.pkl in a folder; "
                  "torch.save writes one");
  }
  return *root;
}

// The entry must hold `expected`, less blanks at the end; absent is as good if it `may_be_absent`.
absl::Status CheckWord(const ZipEntries& entries,
                       const std::string& name,
                       std::string_view expected,
                       bool may_be_absent) {
  const auto found = entries.find(name);
  if (found == entries.end()) {
    return may_be_absent ? absl::OkStatus()
                         : Refuse("torch file: entry '", Printable(name), "' is missing");
  }
  std::string word(reinterpret_cast<const char*>(found->second.data()), found->second.size());
  while (!word.empty() && (word.back() == '\n' || word.back() == ' ')) {
    word.pop_back();
  }
  return word == expected
             ? absl::OkStatus()
             : Refuse("torch file: entry '", Printable(name), "' says '", Printable(word), "'; '",
                      std::string(expected), "' alone is read");
}

// Whether all of the view lies within its storage, and it has no more elements than that. Also
// keeps every product below from overflowing.
bool IsWithin(const PickleTensor& tensor) {
  const uint64_t limit = tensor.storage.num_elements;
  uint64_t count = 1;
  uint64_t last = tensor.offset;
  for (size_t i = 0; i < tensor.shape.size(); ++i) {
    const uint64_t extent = tensor.shape[i];
    if (extent == 0 || extent > limit / count) {
      return false;
    }
    count *= extent;
    if (last > limit || (extent > 1 && tensor.strides[i] > (limit - last) / (extent - 1))) {
      return false;
    }
    last += (extent - 1) * tensor.strides[i];
  }
  return last < limit;
}

// Visits the elements in row-major order: `out` gets the storage's element of each.
void CopyView(const PickleTensor& tensor, const std::byte* storage, std::vector<float>* out) {
  std::vector<uint64_t> index(tensor.shape.size());
  uint64_t at = tensor.offset;
  for (float& element : *out) {
    std::memcpy(&element, storage + at * sizeof(float), sizeof(float));
    for (size_t i = index.size(); i-- > 0;) {
      at += tensor.strides[i];
      if (++index[i] < tensor.shape[i]) {
        break;
      }
      at -= tensor.shape[i] * tensor.strides[i];
      index[i] = 0;
    }
  }
}

}  // namespace

absl::StatusOr<TorchFile> TorchFile::Parse(std::span<const std::byte> file) {
  if (file.size() > kMaxFileBytes) {
    return Refuse("torch file: it has ", file.size(), " bytes; at most ", kMaxFileBytes,
                  " are read");
  }
  CRUMB_ASSIGN_OR_RETURN(ZipEntries entries, ReadStoredEntries(file));
  return FromEntries(std::move(entries));
}

absl::StatusOr<TorchFile> TorchFile::FromEntries(ZipEntries entries) {
  CRUMB_ASSIGN_OR_RETURN(std::string root, FindRoot(entries));
  CRUMB_RETURN_IF_ERROR(CheckWord(entries, root + "version", "3", /*may_be_absent=*/false));
  CRUMB_RETURN_IF_ERROR(CheckWord(entries, root + "byteorder", "little", /*may_be_absent=*/true));
  CRUMB_ASSIGN_OR_RETURN(PickleTree tree, ParsePickle(entries.at(root + kPickleName)));
  return TorchFile(std::move(root), std::move(entries), std::move(tree));
}

absl::StatusOr<std::vector<float>> TorchFile::Floats(const PickleTensor& tensor,
                                                     std::string_view what) const {
  const std::string text(what);
  const std::string name =
      absl::StrCat(root_, "data/", *tree_.Get<std::string>(tensor.storage.key));
  const auto found = entries_.find(name);
  if (found == entries_.end()) {
    return Refuse(text, ": its storage, entry '", Printable(name), "', is missing");
  }
  const uint64_t elements = tensor.storage.num_elements;
  if (elements != found->second.size() / sizeof(float) ||
      found->second.size() % sizeof(float) != 0) {
    return Refuse(text, ": its storage, entry '", Printable(name), "', has ", found->second.size(),
                  " bytes; the pickle says ", elements,
                  " floats. The file is truncated: copy it "
                  "anew");
  }
  if (!IsWithin(tensor)) {
    return Refuse(text, ": size ", ShapeText(tensor.shape), ", stride ", ShapeText(tensor.strides),
                  " from element ", tensor.offset, " leaves its storage of ", elements,
                  " floats, or is empty or larger than it; save a copy made by .contiguous()");
  }
  size_t count = 1;
  for (const uint64_t extent : tensor.shape) {
    count *= extent;
  }
  std::vector<float> floats(count);
  CopyView(tensor, found->second.data(), &floats);
  for (size_t i = 0; i < count; ++i) {
    if (!std::isfinite(floats[i])) {
      return Refuse(text, ": element ", i, " of ", ShapeText(tensor.shape), " is ",
                    std::isnan(floats[i]) ? "NaN" : "infinite", "; all must be finite");
    }
  }
  return floats;
}

}  // namespace crumb::checkpoint
