// SPDX-License-Identifier: Apache-2.0
//
// The thread that copies pages into the tier beside the host arena, and renews segments that were
// given up there. It takes both from the store and holds none of its locks meanwhile.
#pragma once

#include <cstdint>
#include <thread>
#include <vector>

#include "daemon/store/page_store.h"
#include "daemon/tier/copy_tier.h"

namespace crumb {

// Thread-safe.
class Promoter {
 public:
  // Both outlive this. `tier` is the store's.
  Promoter(PageStore& store, CopyTier& tier);
  // Waits for the batch that is being copied; what waits is not.
  ~Promoter();
  Promoter(const Promoter&) = delete;
  Promoter& operator=(const Promoter&) = delete;

 private:
  void RunThread();
  void RenewSegments();
  // False: there was nothing to copy.
  bool CopyBatchOnce();

  PageStore& store_;
  CopyTier& tier_;
  std::vector<uint32_t> unready_;  // Segments for which there was no memory. Of the thread.
  std::thread thread_;
};

}  // namespace crumb
