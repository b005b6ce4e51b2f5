// SPDX-License-Identifier: Apache-2.0
#include "daemon/demote/page_writer.h"

#include "absl/strings/str_cat.h"

#include "daemon/demote/bf16_writer.h"
#include "daemon/demote/head_rows.h"
#include "proto/base/check.h"
#include "proto/base/status_macros.h"
#include "proto/page/page_format.h"

namespace crumb {
namespace {

PageEncoding StoredEncoding(StagedEncoding encoding) {
  return encoding == StagedEncoding::kInt2 ? PageEncoding::kInt2 : PageEncoding::kBf16;
}

size_t ImageBytes(const PageOwner& owner, PageEncoding encoding) {
  return owner.heads.count * owner.profile.geometry().HeadRangeBytes(encoding);
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
                       const PageDevice& device,
                       DemoteScratch& scratch,
                       WrittenPage& written) {
  for (const WritableBlock* block : {task.int2_block, task.bf16_block}) {
    if (block != nullptr) {
      CRUMB_RETURN_IF_ERROR(Populate(block->fresh, block->bytes));
    }
  }
  if (task.staged_int2 != nullptr) {
    CRUMB_RETURN_IF_ERROR(
        WriteInt2(owner, *task.staged_int2, staging, task.int2_block->bytes, written.blocks));
  }
  return task.staged_bf16 == nullptr
             ? absl::OkStatus()
             : Bf16Writer(owner, task, staging, scratch).Write(device, written);
}

}  // namespace crumb
