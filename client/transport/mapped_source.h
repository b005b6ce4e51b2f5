// SPDX-License-Identifier: Apache-2.0
//
// A leased prefix read in place, in mapped chunks of the daemon's arena. Nothing is copied, so what
// was read is right only if no generation moved meanwhile: Validate says so.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

#include "client/transport/mapped_chunk.h"
#include "client/transport/page_source.h"

namespace crumb {

// Thread-safe.
class MappedSource : public PageSource {
 public:
  struct Options {
    std::shared_ptr<const Profile> profile;  // shared: with the session.
    HeadRange heads;
    // Check the bytes against their checksums before their first use. Once a process and page.
    bool verify = true;
  };

  // Maps the chunks and checks each page's header; touches no page bytes. Errors of ChunkMap::Get.
  // FAILED_PRECONDITION, naming page and field: the header is not what the lease named.
  static absl::StatusOr<std::unique_ptr<MappedSource>> Open(const Options& options,
                                                            const LeasedPrefix& prefix,
                                                            ChunkMap* chunks,
                                                            absl::Time deadline);

  const std::byte* HeadBlock(PageIdx page,
                             PageEncoding encoding,
                             uint32_t layer,
                             uint32_t kv_head) const override;
  // All layers come at once: the first call populates and verifies all pages.
  absl::Status WaitForLayer(uint32_t layer) override;
  absl::Status Validate() override;
  size_t copied_bytes() const override { return 0; }
  absl::Status RegisterWithGpu() override;
  std::vector<uint32_t> UncheckedCrc32c(PageIdx page, PageEncoding encoding) const override;
  void SetChecked(PageIdx page, PageEncoding encoding) override;

 private:
  // One encoding of one page. chunk is null where it is absent.
  struct Block {
    MappedChunk* chunk = nullptr;
    const std::byte* image = nullptr;
    uint32_t block = 0;
    Generation generation;
  };
  struct Page {
    Block int2;
    Block bf16;
  };

  explicit MappedSource(const Options& options) : options_(options) {}
  absl::StatusOr<Block> OpenBlock(const LeasedPrefix& prefix,
                                  PageIdx page,
                                  PageEncoding encoding,
                                  ChunkMap* chunks,
                                  absl::Time deadline);
  absl::Status Verify(const Block& block) const;
  absl::Status PopulateAndVerify() const;
  const Block& At(PageIdx page, PageEncoding encoding) const {
    const Page& entry = pages_[page.value()];
    return encoding == PageEncoding::kInt2 ? entry.int2 : entry.bf16;
  }
  template <typename Visitor>  // absl::Status(PageIdx, const Block&); the first error ends it.
  absl::Status ForEachBlock(const Visitor& visit) const;

  const Options options_;
  // Constant after Open. shared: with other prefixes in the same chunks; they keep the mappings.
  std::vector<std::shared_ptr<MappedChunk>> chunks_;
  std::vector<Page> pages_;

  absl::Mutex mutex_;
  bool populated_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status verdict_ ABSL_GUARDED_BY(mutex_);  // Once populated.
};

}  // namespace crumb
