// SPDX-License-Identifier: Apache-2.0
//
// A leased prefix read on a GPU: in place in the daemon's chunks of copies where pages have copies
// there, and through another source where they have not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "client/transport/gpu_chunk.h"
#include "client/transport/page_source.h"

namespace crumb {

// Thread-safe.
class GpuSource : public PageSource {
 public:
  struct Options {
    std::shared_ptr<const Profile> profile;  // shared: with the session.
    HeadRange heads;
  };

  // Maps the chunks and checks each page's header. `rest` has the places that have no copy. Errors
  // of GpuChunkMap::Get. FAILED_PRECONDITION, naming page and field: the header is not what the
  // lease named.
  static absl::StatusOr<std::unique_ptr<GpuSource>> Open(const Options& options,
                                                         const LeasedPrefix& prefix,
                                                         std::unique_ptr<PageSource> rest,
                                                         GpuChunkMap* chunks,
                                                         absl::Time deadline);
  // What Open's `rest` is to bring: the prefix without the places that have a copy.
  static LeasedPrefix RestOf(const LeasedPrefix& prefix);

  const std::byte* GpuPage(PageIdx page, PageEncoding encoding) const override;
  const std::byte* HeadBlock(PageIdx page,
                             PageEncoding encoding,
                             uint32_t layer,
                             uint32_t kv_head) const override {
    return rest_->HeadBlock(page, encoding, layer, kv_head);
  }
  uint32_t first_image_layer() const override { return rest_->first_image_layer(); }
  absl::Status RegisterWithGpu() override { return rest_->RegisterWithGpu(); }
  std::vector<uint32_t> UncheckedCrc32c(PageIdx page, PageEncoding encoding) const override {
    return rest_->UncheckedCrc32c(page, encoding);
  }
  void SetChecked(PageIdx page, PageEncoding encoding) override {
    rest_->SetChecked(page, encoding);
  }
  absl::Status WaitForLayer(uint32_t layer) override { return rest_->WaitForLayer(layer); }
  absl::Status Validate() override;
  size_t copied_bytes() const override { return rest_->copied_bytes(); }

 private:
  struct Block {
    GpuChunk* chunk = nullptr;  // Null: no copy.
    uint32_t block = 0;
    Generation generation;
  };
  struct Page {
    Block int2;
    Block bf16;
  };

  explicit GpuSource(std::unique_ptr<PageSource> rest) : rest_(std::move(rest)) {}
  absl::StatusOr<Block> OpenBlock(const Options& options,
                                  const LeasedPrefix& prefix,
                                  const PageIdx& page,
                                  PageEncoding encoding,
                                  GpuChunkMap* chunks,
                                  absl::Time deadline);

  const std::unique_ptr<PageSource> rest_;
  // Constant after Open. shared: with other prefixes in the same chunks; they keep the mappings.
  std::vector<std::shared_ptr<GpuChunk>> chunks_;
  std::vector<Page> pages_;
};

}  // namespace crumb
