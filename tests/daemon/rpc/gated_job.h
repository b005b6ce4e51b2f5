// SPDX-License-Identifier: Apache-2.0
//
// Occupies a thread of the demotion pool, and so a place of its queue, until `gate` opens.
#pragma once

#include "absl/status/status.h"
#include "absl/synchronization/notification.h"

#include "daemon/demote/demote_pool.h"

namespace crumb {

class GatedJob : public DemoteJob {
 public:
  explicit GatedJob(const absl::Notification& gate) : gate_(gate) {}
  size_t num_pages() const override { return 1; }
  absl::Status RunPage(size_t /*index*/, DemoteScratch& /*scratch*/) override {
    gate_.WaitForNotification();
    return absl::OkStatus();
  }
  void Finish(absl::Status /*status*/) override {}

 private:
  const absl::Notification& gate_;
};

}  // namespace crumb
