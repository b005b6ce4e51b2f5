// SPDX-License-Identifier: Apache-2.0
#include "daemon/demote/page_writer.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

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

size_t HeadBytes(const PageOwner& owner, PageEncoding encoding) {
  return owner.profile.geometry().HeadRangeBytes(encoding);
}

// Copies the session's head `head` of the image to `target` and compares what was copied with the
// checksum that came with it.
absl::Status CopyHeadChecked(const PageOwner& owner,
                             const StagedPage& staged,
                             uint32_t head,
                             std::span<const std::byte> staging,
                             std::span<std::byte> target) {
  const uint32_t crc =
      CopyWithCrc32c(staging.subspan(staged.offset + head * target.size(), target.size()), target);
  if (crc != staged.head_crc32c[head]) {
    return absl::DataLossError(absl::StrFormat(
        "%s, KV head %u: checksum %08x over the bytes read, %08x was announced; stage the page "
        "again, and leave it alone until the commit returns",
        Name(staged), owner.heads.first + head, crc, staged.head_crc32c[head]));
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

// The rows of the session's head `head`, all layers.
absl::Status CheckFiniteBf16(const PageOwner& owner,
                             const StagedPage& staged,
                             uint32_t head,
                             std::span<const std::byte> rows) {
  const auto* values = reinterpret_cast<const BFloat16*>(rows.data());
  const size_t num_values = rows.size() / sizeof(BFloat16);
  if (AllFinite(values, num_values)) {
    return absl::OkStatus();
  }
  const Geometry& geometry = owner.profile.geometry();
  const size_t block_elements = geometry.Bf16Block().bytes() / sizeof(BFloat16);
  const size_t key_elements = size_t{kPageTokens} * geometry.key_dim;
  const auto* bad =
      std::find_if(values, values + num_values, [](BFloat16 value) { return !value.IsFinite(); });
  const auto index = static_cast<size_t>(bad - values);
  const size_t element = index % block_elements;
  const bool is_key = element < key_elements;
  const size_t token =
      is_key ? element / geometry.key_dim : (element - key_elements) / geometry.value_dim;
  return NotFinite(staged, static_cast<uint32_t>(index / block_elements), owner.heads.first + head,
                   static_cast<uint32_t>(token), is_key ? "an element of K" : "an element of V");
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

std::span<std::byte> Sized(std::vector<std::byte>& buffer, size_t bytes) {
  buffer.resize(std::max(buffer.size(), bytes));
  return std::span(buffer).first(bytes);
}

// The rows of one head as they are stored, in `stored`.
absl::Status StoreRows(const PageOwner& owner,
                       const StagedPage& staged,
                       uint32_t head,
                       std::span<const std::byte> staging,
                       DemoteScratch& scratch,
                       std::span<std::byte> stored) {
  if (staged.encoding == StagedEncoding::kBf16) {
    CRUMB_RETURN_IF_ERROR(CopyHeadChecked(owner, staged, head, staging, stored));
    return CheckFiniteBf16(owner, staged, head, stored);
  }
  const std::span<std::byte> plain = Sized(scratch.incoming, stored.size());
  CRUMB_RETURN_IF_ERROR(CopyHeadChecked(owner, staged, head, staging, plain));
  return RotatePage(owner.profile, {owner.heads.first + head, 1}, FirstToken(staged.page), plain,
                    stored);
}

absl::Status WriteInt2(const PageOwner& owner,
                       const StagedPage& staged,
                       std::span<const std::byte> staging,
                       std::span<std::byte> image,
                       std::vector<WrittenBlock>& written) {
  const size_t head_bytes = HeadBytes(owner, PageEncoding::kInt2);
  for (uint32_t head = 0; head < owner.heads.count; ++head) {
    CRUMB_RETURN_IF_ERROR(CopyHeadChecked(owner, staged, head, staging,
                                          image.subspan(head * head_bytes, head_bytes)));
  }
  CRUMB_RETURN_IF_ERROR(CheckFiniteMeta(owner, staged, image));
  written.push_back({staged.page, PageEncoding::kInt2, staged.head_crc32c});
  return absl::OkStatus();
}

// Fills the blocks that want it, head by head, so that a head's rows are still in the cache when
// they are demoted.
absl::Status WriteBf16(const PageOwner& owner,
                       const PageTask& task,
                       std::span<const std::byte> staging,
                       DemoteScratch& scratch,
                       std::vector<WrittenBlock>& written) {
  const StagedPage& staged = *task.staged_bf16;
  const bool demotes = task.int2_block != nullptr && task.staged_int2 == nullptr;
  const size_t bf16_bytes = HeadBytes(owner, PageEncoding::kBf16);
  const size_t int2_bytes = HeadBytes(owner, PageEncoding::kInt2);
  WrittenBlock int2{staged.page, PageEncoding::kInt2, {}};
  WrittenBlock bf16{staged.page, PageEncoding::kBf16, {}};
  for (uint32_t head = 0; head < owner.heads.count; ++head) {
    const std::span<std::byte> stored =
        task.bf16_block != nullptr ? task.bf16_block->bytes.subspan(head * bf16_bytes, bf16_bytes)
                                   : Sized(scratch.stored, bf16_bytes);
    CRUMB_RETURN_IF_ERROR(StoreRows(owner, staged, head, staging, scratch, stored));
    if (demotes) {
      const std::span<std::byte> codes =
          task.int2_block->bytes.subspan(head * int2_bytes, int2_bytes);
      CRUMB_RETURN_IF_ERROR(DemotePage(owner.profile, {owner.heads.first + head, 1},
                                       FirstToken(staged.page), stored, codes));
      int2.head_crc32c.push_back(Crc32c(codes));
    }
    if (task.bf16_block != nullptr) {
      // Of bytes that came as they are stored, the checksum that the copy was compared with.
      bf16.head_crc32c.push_back(staged.encoding == StagedEncoding::kBf16 ? staged.head_crc32c[head]
                                                                          : Crc32c(stored));
    }
  }
  if (demotes) {
    written.push_back(std::move(int2));
  }
  if (task.bf16_block != nullptr) {
    written.push_back(std::move(bf16));
  }
  return absl::OkStatus();
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
  for (const WritableBlock* block : {task.int2_block, task.bf16_block}) {
    if (block != nullptr) {
      CRUMB_RETURN_IF_ERROR(Populate(block->fresh, block->bytes));
    }
  }
  if (task.staged_int2 != nullptr) {
    CRUMB_RETURN_IF_ERROR(
        WriteInt2(owner, *task.staged_int2, staging, task.int2_block->bytes, written));
  }
  return task.staged_bf16 == nullptr ? absl::OkStatus()
                                     : WriteBf16(owner, task, staging, scratch, written);
}

}  // namespace crumb
