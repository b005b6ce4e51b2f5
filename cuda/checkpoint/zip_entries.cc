// SPDX-License-Identifier: Apache-2.0
#include "cuda/checkpoint/zip_entries.h"

#include <zip.h>

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"

#include "cuda/profile/safetensors.h"
#include "proto/base/status_macros.h"

namespace crumb::checkpoint {
namespace {

template <typename... Parts>
absl::Status Refuse(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat("zip archive: ", parts...));
}

struct DiscardArchive {
  void operator()(zip_t* archive) const { zip_discard(archive); }
};
using Archive = std::unique_ptr<zip_t, DiscardArchive>;

struct CloseEntry {
  void operator()(zip_file_t* entry) const { zip_fclose(entry); }
};

// libzip's words about `error`, which is finished.
std::string Words(zip_error_t* error) {
  std::string words = zip_error_strerror(error);
  zip_error_fini(error);
  return words;
}

absl::StatusOr<Archive> Open(std::span<const std::byte> file) {
  if (file.empty()) {  // Which libzip takes for an archive without entries.
    return Refuse("the file is empty");
  }
  zip_error_t error;
  zip_error_init(&error);
  zip_source_t* source = zip_source_buffer_create(file.data(), file.size(), 0, &error);
  if (source == nullptr) {
    return Refuse("cannot be read: ", Words(&error));
  }
  Archive archive(zip_open_from_source(source, ZIP_RDONLY | ZIP_CHECKCONS, &error));
  if (archive == nullptr) {
    zip_source_free(source);
    return Refuse("the ", file.size(), " bytes are no whole zip archive (", Words(&error),
                  "); a torch.save file of PyTorch 1.6 or later is one");
  }
  zip_error_fini(&error);
  return archive;
}

const char* MethodName(uint16_t method) {
  switch (method) {
    case ZIP_CM_DEFLATE:
      return "deflate";
    case ZIP_CM_DEFLATE64:
      return "deflate64";
    case ZIP_CM_BZIP2:
      return "bzip2";
    case ZIP_CM_LZMA:
      return "LZMA";
    case ZIP_CM_XZ:
      return "XZ";
    case 93:  // ZIP_CM_ZSTD, which older headers lack.
      return "Zstandard";
    default:
      return "another method";
  }
}

// Checks what the archive says of an entry; `bytes_left` of the file are not yet spoken for.
absl::Status CheckEntry(const zip_stat_t& entry, size_t bytes_left) {
  constexpr uint64_t kNeeded = ZIP_STAT_NAME | ZIP_STAT_SIZE | ZIP_STAT_COMP_SIZE |
                               ZIP_STAT_COMP_METHOD | ZIP_STAT_ENCRYPTION_METHOD;
  if ((entry.valid & kNeeded) != kNeeded) {
    return Refuse("entry ", entry.index, " lacks its name, size or method");
  }
  const std::string name = Printable(entry.name);
  if (entry.encryption_method != ZIP_EM_NONE) {
    return Refuse("entry '", name, "' is encrypted; torch.save does not encrypt");
  }
  if (entry.comp_method != ZIP_CM_STORE) {
    return Refuse("entry '", name, "' is compressed (method ", entry.comp_method, ", ",
                  MethodName(entry.comp_method),
                  "); torch.save stores its entries: save the file anew with it");
  }
  if (entry.size != entry.comp_size || entry.size > bytes_left) {
    return Refuse("entry '", name, "' claims ", entry.size, " bytes (", entry.comp_size,
                  " in the archive), where at most ", bytes_left, " are left of the file");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::byte>> ReadEntry(zip_t* archive, const zip_stat_t& entry) {
  std::vector<std::byte> bytes(entry.size);
  const std::unique_ptr<zip_file_t, CloseEntry> reader(zip_fopen_index(archive, entry.index, 0));
  if (reader == nullptr) {
    return Refuse("entry '", Printable(entry.name), "': ", zip_strerror(archive));
  }
  size_t done = 0;
  while (true) {
    // One byte more than there should be, since libzip checks the CRC at the end.
    std::byte beyond{};
    const bool is_full = done == bytes.size();
    const zip_int64_t read = zip_fread(reader.get(), is_full ? &beyond : bytes.data() + done,
                                       is_full ? 1 : bytes.size() - done);
    if (read < 0 || (read > 0 && is_full)) {
      return Refuse("entry '", Printable(entry.name), "' of ", bytes.size(),
                    " bytes: ", read < 0 ? zip_file_strerror(reader.get()) : "there are more",
                    " at byte ", done, "; copy the file anew");
    }
    if (read == 0) {
      break;
    }
    done += static_cast<size_t>(read);
  }
  if (done != bytes.size()) {
    return Refuse("entry '", Printable(entry.name), "' is truncated: ", done, " of ", bytes.size(),
                  " bytes are there");
  }
  return bytes;
}

}  // namespace

absl::StatusOr<ZipEntries> ReadStoredEntries(std::span<const std::byte> file) {
  CRUMB_ASSIGN_OR_RETURN(const Archive archive, Open(file));
  const zip_int64_t count = zip_get_num_entries(archive.get(), 0);
  if (count < 0 || static_cast<size_t>(count) > kMaxZipEntries) {
    return Refuse("it has ", count, " entries; at most ", kMaxZipEntries, " are read");
  }
  ZipEntries entries;
  size_t bytes_left = file.size();
  for (zip_uint64_t index = 0; index < static_cast<zip_uint64_t>(count); ++index) {
    zip_stat_t entry;
    if (zip_stat_index(archive.get(), index, ZIP_FL_ENC_RAW, &entry) != 0) {
      return Refuse("entry ", index, ": ", zip_strerror(archive.get()));
    }
    CRUMB_RETURN_IF_ERROR(CheckEntry(entry, bytes_left));
    bytes_left -= entry.size;
    CRUMB_ASSIGN_OR_RETURN(std::vector<std::byte> bytes, ReadEntry(archive.get(), entry));
    if (!entries.emplace(entry.name, std::move(bytes)).second) {
      return Refuse("entry '", Printable(entry.name), "' is there twice");
    }
  }
  return entries;
}

}  // namespace crumb::checkpoint
