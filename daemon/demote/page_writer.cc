// SPDX-License-Identifier: Apache-2.0
#include "daemon/demote/page_writer.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"

#include "crumb/cuda/demote.h"
#include "proto/base/bfloat16.h"
#include "proto/base/check.h"
#include "proto/base/crc32c.h"
#include "proto/base/status_macros.h"
#include "proto/page/page_format.h"

namespace crumb {
namespace {

absl::string_view EncodingName(StagedEncoding encoding) {
  switch (encoding) {
    case StagedEncoding::kInt2:
      return "INT2";
    case StagedEncoding::kBf16:
      return "BF16";
    case StagedEncoding::kBf16Plain:
      return "plain BF16";
  }
  return "unknown";
}

std::string Name(const StagedPage& staged) {
  return absl::StrCat("staged page ", staged.page.value(), " (", EncodingName(staged.encoding),
                      ")");
}

PageEncoding StoredEncoding(StagedEncoding encoding) {
  return encoding == StagedEncoding::kInt2 ? PageEncoding::kInt2 : PageEncoding::kBf16;
}

size_t ImageBytes(const PageOwner& owner, PageEncoding encoding) {
  return owner.heads.count * owner.profile.geometry().HeadRangeBytes(encoding);
}

uint32_t FirstToken(PageIdx page) {
  return page.value() * kPageTokens;
}

absl::Status CheckStagedPage(const PageOwner& owner,
                             const StagedPage& staged,
                             uint64_t staging_bytes) {
  const size_t image_bytes = ImageBytes(owner, StoredEncoding(staged.encoding));
  if (staging_bytes < image_bytes || staged.offset > staging_bytes - image_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        Name(staged), " lies at [", staged.offset, ", +", image_bytes,
        "), beyond the staging memory of ", staging_bytes, " bytes: hand over a larger one"));
  }
  if (staged.head_crc32c.size() != owner.heads.count) {
    return absl::InvalidArgumentError(
        absl::StrCat(Name(staged), " has ", staged.head_crc32c.size(), " checksums for ",
                     owner.heads.count, " KV heads: give one for each head of the session"));
  }
  return absl::OkStatus();
}

// Ascending by page and encoding; BF16 of one page once, plain or not.
absl::Status CheckOrder(const StagedPage& before, const StagedPage& staged) {
  if (before.page == staged.page &&
      StoredEncoding(before.encoding) == StoredEncoding(staged.encoding)) {
    return absl::InvalidArgumentError(absl::StrCat(Name(staged), " was staged already as ",
                                                   Name(before), ": stage each page once"));
  }
  if (staged.page < before.page ||
      (staged.page == before.page && staged.encoding < before.encoding)) {
    return absl::InvalidArgumentError(
        absl::StrCat(Name(staged), " comes after ", Name(before),
                     ": list staged pages in ascending order of page and encoding"));
  }
  return absl::OkStatus();
}

// Copies the image to `target` and compares what was copied with the checksums that came with it.
absl::Status CopyChecked(const PageOwner& owner,
                         const StagedPage& staged,
                         std::span<const std::byte> staging,
                         std::span<std::byte> target) {
  const size_t head_bytes =
      owner.profile.geometry().HeadRangeBytes(StoredEncoding(staged.encoding));
  for (uint32_t i = 0; i < owner.heads.count; ++i) {
    const uint32_t crc = CopyWithCrc32c(staging.subspan(staged.offset + i * head_bytes, head_bytes),
                                        target.subspan(i * head_bytes, head_bytes));
    if (crc != staged.head_crc32c[i]) {
      return absl::DataLossError(absl::StrFormat(
          "%s, KV head %u: checksum %08x over the bytes read, %08x was announced; stage the page "
          "again, and leave it alone until the commit returns",
          Name(staged), owner.heads.first + i, crc, staged.head_crc32c[i]));
    }
  }
  return absl::OkStatus();
}

absl::Status NotFinite(const StagedPage& staged,
                       uint32_t layer,
                       uint32_t head,
                       uint32_t token,
                       absl::string_view what) {
  return absl::InvalidArgumentError(
      absl::StrCat(Name(staged), ": ", what, " of layer ", layer, ", KV head ", head, ", token ",
                   FirstToken(staged.page) + token, " is not finite; such a page is not kept"));
}

// For BF16 pages that are kept as they are: demotion checks those that it reads.
absl::Status CheckFiniteBf16(const PageOwner& owner,
                             const StagedPage& staged,
                             std::span<const std::byte> stored) {
  const Geometry& geometry = owner.profile.geometry();
  const size_t block_elements = geometry.Bf16Block().bytes() / sizeof(BFloat16);
  const size_t key_elements = size_t{kPageTokens} * geometry.key_dim;
  const auto* values = reinterpret_cast<const BFloat16*>(stored.data());
  for (size_t i = 0; i < stored.size() / sizeof(BFloat16); ++i) {
    if (values[i].IsFinite()) {
      continue;
    }
    const size_t block = i / block_elements;
    const size_t element = i % block_elements;
    const bool is_key = element < key_elements;
    const size_t token =
        is_key ? element / geometry.key_dim : (element - key_elements) / geometry.value_dim;
    return NotFinite(staged, static_cast<uint32_t>(block % geometry.num_layers),
                     owner.heads.first + static_cast<uint32_t>(block / geometry.num_layers),
                     static_cast<uint32_t>(token), is_key ? "an element of K" : "an element of V");
  }
  return absl::OkStatus();
}

// The scale and minimum of each row, in fp16: all bits of the exponent set is inf or NaN.
absl::Status CheckFiniteMeta(const PageOwner& owner,
                             const StagedPage& staged,
                             std::span<const std::byte> image) {
  const Geometry& geometry = owner.profile.geometry();
  const Int2HeadBlock layout = geometry.Int2Block();
  for (size_t block = 0; block < image.size() / layout.bytes(); ++block) {
    const std::byte* bytes = image.data() + block * layout.bytes();
    for (uint32_t token = 0; token < kPageTokens; ++token) {
      for (const bool is_key : {true, false}) {
        uint16_t meta[2];
        std::memcpy(meta,
                    bytes + (is_key ? layout.KeyMetaByte(token) : layout.ValueMetaByte(token)),
                    sizeof(meta));
        if ((meta[0] & 0x7c00) == 0x7c00 || (meta[1] & 0x7c00) == 0x7c00) {
          return NotFinite(staged, static_cast<uint32_t>(block % geometry.num_layers),
                           owner.heads.first + static_cast<uint32_t>(block / geometry.num_layers),
                           token, is_key ? "the scale of K" : "the scale of V");
        }
      }
    }
  }
  return absl::OkStatus();
}

WrittenBlock Written(const PageOwner& owner, const WritableBlock& block) {
  WrittenBlock written{block.key.page, block.key.encoding, {}};
  const size_t head_bytes = owner.profile.geometry().HeadRangeBytes(block.key.encoding);
  for (uint32_t i = 0; i < owner.heads.count; ++i) {
    written.head_crc32c.push_back(Crc32c(block.bytes.subspan(i * head_bytes, head_bytes)));
  }
  return written;
}

std::span<std::byte> Sized(std::vector<std::byte>& buffer, size_t bytes) {
  buffer.resize(std::max(buffer.size(), bytes));
  return std::span(buffer).first(bytes);
}

// The page's rows as they are stored, in the BF16 block if it is wanted and in scratch otherwise.
absl::StatusOr<std::span<const std::byte>> StoredRows(const PageOwner& owner,
                                                      const PageTask& task,
                                                      std::span<const std::byte> staging,
                                                      DemoteScratch& scratch) {
  const StagedPage& staged = *task.staged_bf16;
  const size_t bytes = ImageBytes(owner, PageEncoding::kBf16);
  const std::span<std::byte> stored =
      task.bf16_block != nullptr ? task.bf16_block->bytes : Sized(scratch.stored, bytes);
  if (staged.encoding == StagedEncoding::kBf16) {
    CRUMB_RETURN_IF_ERROR(CopyChecked(owner, staged, staging, stored));
    CRUMB_RETURN_IF_ERROR(CheckFiniteBf16(owner, staged, stored));
    return stored;
  }
  const std::span<std::byte> plain = Sized(scratch.incoming, bytes);
  CRUMB_RETURN_IF_ERROR(CopyChecked(owner, staged, staging, plain));
  CRUMB_RETURN_IF_ERROR(
      RotatePage(owner.profile, owner.heads, FirstToken(staged.page), plain, stored));
  return stored;
}

}  // namespace

absl::StatusOr<std::vector<PageTask>> PlanPages(const PageOwner& owner,
                                                std::span<const StagedPage> staged,
                                                std::span<const WritableBlock> missing,
                                                uint64_t staging_bytes) {
  std::vector<PageTask> tasks;
  auto block = missing.begin();
  for (size_t i = 0; i < staged.size();) {
    PageTask task;
    const PageIdx page = staged[i].page;
    for (; i < staged.size() && staged[i].page == page; ++i) {
      CRUMB_RETURN_IF_ERROR(CheckStagedPage(owner, staged[i], staging_bytes));
      if (i > 0) {
        CRUMB_RETURN_IF_ERROR(CheckOrder(staged[i - 1], staged[i]));
      }
      (staged[i].encoding == StagedEncoding::kInt2 ? task.staged_int2 : task.staged_bf16) =
          &staged[i];
    }
    if (i < staged.size()) {
      CRUMB_RETURN_IF_ERROR(CheckOrder(staged[i - 1], staged[i]));
    }
    while (block != missing.end() && block->key.page < page) {
      ++block;
    }
    for (; block != missing.end() && block->key.page == page; ++block) {
      const bool is_int2 = block->key.encoding == PageEncoding::kInt2;
      CRUMB_CHECK(block->bytes.size() == ImageBytes(owner, block->key.encoding),
                  "a block holds the session's heads");
      if (is_int2) {
        task.int2_block = &*block;
      } else if (task.staged_bf16 != nullptr) {
        task.bf16_block = &*block;
      }
    }
    const bool int2_is_wanted = task.staged_int2 == nullptr || task.int2_block != nullptr;
    const bool bf16_is_wanted = task.staged_bf16 == nullptr || task.bf16_block != nullptr ||
                                (task.int2_block != nullptr && task.staged_int2 == nullptr);
    if (!int2_is_wanted || !bf16_is_wanted) {
      return absl::InvalidArgumentError(
          absl::StrCat(Name(int2_is_wanted ? *task.staged_bf16 : *task.staged_int2),
                       " was not asked for: stage what BeginPublish lists as missing"));
    }
    tasks.push_back(task);
  }
  return tasks;
}

absl::Status WritePage(const PageOwner& owner,
                       const PageTask& task,
                       std::span<const std::byte> staging,
                       DemoteScratch& scratch,
                       std::vector<WrittenBlock>& written) {
  if (task.staged_int2 != nullptr) {
    const StagedPage& staged = *task.staged_int2;
    CRUMB_RETURN_IF_ERROR(CopyChecked(owner, staged, staging, task.int2_block->bytes));
    CRUMB_RETURN_IF_ERROR(CheckFiniteMeta(owner, staged, task.int2_block->bytes));
    written.push_back({staged.page, PageEncoding::kInt2, staged.head_crc32c});
  }
  if (task.staged_bf16 == nullptr) {
    return absl::OkStatus();
  }
  CRUMB_ASSIGN_OR_RETURN(const std::span<const std::byte> stored,
                         StoredRows(owner, task, staging, scratch));
  if (task.int2_block != nullptr && task.staged_int2 == nullptr) {
    CRUMB_RETURN_IF_ERROR(DemotePage(owner.profile, owner.heads, FirstToken(task.staged_bf16->page),
                                     stored, task.int2_block->bytes));
    written.push_back(Written(owner, *task.int2_block));
  }
  if (task.bf16_block != nullptr) {
    written.push_back(Written(owner, *task.bf16_block));
  }
  return absl::OkStatus();
}

}  // namespace crumb
