// SPDX-License-Identifier: Apache-2.0
#include "client/session/page_places.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace crumb {

absl::StatusOr<std::vector<PagePlaces>> UnpackPages(const v1::PageTable& table, size_t num_pages) {
  const auto has = [](const auto& list, size_t size) {
    return static_cast<size_t>(list.size()) == size;
  };
  const auto num_bf16 = static_cast<size_t>(table.bf16_page_size());
  const bool is_whole = has(table.int2_chunk(), num_pages) && has(table.int2_block(), num_pages) &&
                        has(table.int2_generation(), num_pages) &&
                        has(table.bf16_chunk(), num_bf16) && has(table.bf16_block(), num_bf16) &&
                        has(table.bf16_generation(), num_bf16) &&
                        std::all_of(table.bf16_page().begin(), table.bf16_page().end(),
                                    [&](uint32_t page) { return page < num_pages; });
  if (!is_whole) {
    return absl::InternalError(
        absl::StrCat("crumbd answered a lookup of ", num_pages,
                     " pages with a page table of another length; use the library and the daemon "
                     "of one release"));
  }
  std::vector<PagePlaces> pages(num_pages);
  for (int i = 0; i < static_cast<int>(num_pages); ++i) {
    pages[static_cast<size_t>(i)].int2 = {ChunkId(table.int2_chunk(i)), table.int2_block(i),
                                          Generation(table.int2_generation(i))};
  }
  for (int i = 0; i < static_cast<int>(num_bf16); ++i) {
    pages[table.bf16_page(i)].bf16 = {ChunkId(table.bf16_chunk(i)), table.bf16_block(i),
                                      Generation(table.bf16_generation(i))};
  }
  return pages;
}

absl::Status UnpackGpuPages(const v1::PageTable& table, std::vector<PagePlaces>* pages) {
  if (table.gpu_int2_chunk_size() == 0) {
    return absl::OkStatus();
  }
  const auto num_pages = static_cast<int>(pages->size());
  const int num_bf16 = table.bf16_page_size();
  if (table.gpu_int2_chunk_size() != num_pages || table.gpu_int2_block_size() != num_pages ||
      table.gpu_int2_generation_size() != num_pages || table.gpu_bf16_chunk_size() != num_bf16 ||
      table.gpu_bf16_block_size() != num_bf16 || table.gpu_bf16_generation_size() != num_bf16) {
    return absl::InternalError(
        absl::StrCat("crumbd answered a lookup of ", num_pages,
                     " pages with a table of another length of those on the GPU; use the library "
                     "and the daemon of one release"));
  }
  for (int i = 0; i < num_pages; ++i) {
    (*pages)[static_cast<size_t>(i)].gpu_int2 = {ChunkId(table.gpu_int2_chunk(i)),
                                                 table.gpu_int2_block(i),
                                                 Generation(table.gpu_int2_generation(i))};
  }
  for (int i = 0; i < num_bf16; ++i) {
    (*pages)[table.bf16_page(i)].gpu_bf16 = {ChunkId(table.gpu_bf16_chunk(i)),
                                             table.gpu_bf16_block(i),
                                             Generation(table.gpu_bf16_generation(i))};
  }
  return absl::OkStatus();
}

}  // namespace crumb
