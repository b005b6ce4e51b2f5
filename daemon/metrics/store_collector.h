// SPDX-License-Identifier: Apache-2.0
//
// The figures of the store and of the sessions' table as Prometheus wants them.
#pragma once

#include <vector>

#include "prometheus/collectable.h"
#include "prometheus/metric_family.h"

#include "daemon/store/page_store.h"
#include "daemon/transfer/session_table.h"

namespace crumb {

// Thread-safe. Reads the store once a scrape.
class StoreCollector : public prometheus::Collectable {
 public:
  // Both outlive this.
  StoreCollector(const PageStore& store, const SessionTable& sessions)
      : store_(store), sessions_(sessions) {}

  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  const PageStore& store_;
  const SessionTable& sessions_;
};

}  // namespace crumb
