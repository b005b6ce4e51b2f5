// SPDX-License-Identifier: Apache-2.0
//
// The store's figures as Prometheus wants them.
#pragma once

#include <vector>

#include "prometheus/collectable.h"
#include "prometheus/metric_family.h"

#include "daemon/store/page_store.h"

namespace crumb {

// Thread-safe. Reads the store once a scrape.
class StoreCollector : public prometheus::Collectable {
 public:
  // `store` outlives this.
  explicit StoreCollector(const PageStore& store) : store_(store) {}

  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  const PageStore& store_;
};

}  // namespace crumb
