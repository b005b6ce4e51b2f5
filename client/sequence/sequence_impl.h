// SPDX-License-Identifier: Apache-2.0
//
// Sequence behind its public face: the protocol of a chunk, spread over worker threads. Pages and
// regions are PageTable's, the work on one head HeadWorker's.
#pragma once

#include <memory>
#include <vector>

#include "client/sequence/head_worker.h"
#include "client/sequence/page_table.h"
#include "client/sequence/worker_pool.h"
#include "crumb/sequence.h"

namespace crumb {

class Sequence::Impl {
 public:
  // `options` are checked, and complete: heads.count and scale are not 0.
  explicit Impl(Options options);

  uint32_t length() const { return length_; }
  const Options& options() const { return options_; }

  // shared: with the handle's other users.
  absl::Status Adopt(std::shared_ptr<SharedPrefix> prefix);
  absl::Status RetainTail(uint32_t prefix_tokens);
  void ReleaseTail() { pages_.ReleaseRetained(); }

  absl::Status BeginChunk(uint32_t num_tokens);
  absl::Status Append(uint32_t layer, std::span<const float> keys, std::span<const float> values);
  absl::Status Attend(uint32_t layer, std::span<const float> queries, std::span<float> out);
  absl::Status EndChunk();
  void AbandonChunk();

  Footprint footprint() const;
  bool HasPage(PageIdx page, PageEncoding encoding) const;
  absl::Status ExportPage(PageIdx page,
                          PageEncoding encoding,
                          std::span<std::byte> image,
                          std::span<uint32_t> head_crc32c) const;

 private:
  // Queries that are attended together: a whole page's worth shares one reading of history.
  static constexpr uint32_t kQueryBlock = kPageTokens;

  const Geometry& model() const { return options_.profile->geometry(); }
  const HeadParameters& head(uint32_t layer, uint32_t head_of_rank) const {
    return options_.profile->head(layer, options_.heads.first + head_of_rank);
  }
  absl::Status CheckChunk(const char* call, uint32_t layer) const;
  // Returns the checksum of what it wrote.
  uint32_t ExportHead(PageIdx page,
                      PageEncoding encoding,
                      uint32_t kv_head,
                      std::span<std::byte> image) const;
  absl::Status AppendHead(uint32_t layer,
                          uint32_t head_of_rank,
                          std::span<const float> keys,
                          std::span<const float> values,
                          HeadWorker* worker);
  absl::Status WaitForPrefix(uint32_t end_layer);
  absl::Status FinishChunk();
  absl::Status Demote(std::vector<PageTable::Demotion>* demotions);

  const Options options_;
  const Geometry rank_;  // The model's, with this rank's heads only.
  PageTable pages_;
  WorkerPool pool_;
  std::vector<HeadWorker> workers_;  // One a thread of the pool.

  uint32_t length_ = 0;
  uint32_t chunk_tokens_ = 0;         // 0: no chunk is open.
  std::vector<bool> appended_;        // By layer, of the open chunk.
  uint32_t prefix_layers_ready_ = 0;  // Of the adopted prefix.
};

}  // namespace crumb
