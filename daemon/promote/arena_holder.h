// SPDX-License-Identifier: Apache-2.0
//
// The thread that prepares the host arena's chunks for the tier beside: as soon as one is made, it
// has the system give its memory and the tier's device read it by itself, so that the promoter's
// copies run at the bus's speed. Nothing waits for it; what it has not come to yet, or what failed,
// is written and copied as ever.
#pragma once

#include <thread>

#include "daemon/store/page_store.h"
#include "daemon/tier/copy_tier.h"

namespace crumb {

// Thread-safe.
class ArenaHolder {
 public:
  // Both outlive this. `tier` is the store's.
  ArenaHolder(PageStore& store, CopyTier& tier);
  // Waits for the chunk that is being prepared.
  ~ArenaHolder();
  ArenaHolder(const ArenaHolder&) = delete;
  ArenaHolder& operator=(const ArenaHolder&) = delete;

 private:
  void RunThread();

  PageStore& store_;
  CopyTier& tier_;
  std::thread thread_;
};

}  // namespace crumb
