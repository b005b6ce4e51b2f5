// SPDX-License-Identifier: Apache-2.0
#include "daemon/metrics/store_collector.h"

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>

namespace crumb {
namespace {

struct Sample {
  std::string_view label;
  uint64_t value;
};

// One family; with a `label`, one sample a label value.
class Families {
 public:
  void Counter(const char* name, const char* help, uint64_t value) {
    Add(prometheus::MetricType::Counter, name, help, "", {{"", value}});
  }
  void Gauge(const char* name, const char* help, uint64_t value) {
    Add(prometheus::MetricType::Gauge, name, help, "", {{"", value}});
  }
  void Add(prometheus::MetricType type,
           const char* name,
           const char* help,
           std::string_view label,
           std::initializer_list<Sample> samples) {
    prometheus::MetricFamily family{name, help, type, {}};
    for (const Sample& sample : samples) {
      prometheus::ClientMetric metric;
      if (!label.empty()) {
        metric.label.push_back({std::string(label), std::string(sample.label)});
      }
      const auto value = static_cast<double>(sample.value);
      if (type == prometheus::MetricType::Counter) {
        metric.counter.value = value;
      } else {
        metric.gauge.value = value;
      }
      family.metric.push_back(std::move(metric));
    }
    families_.push_back(std::move(family));
  }
  std::vector<prometheus::MetricFamily> Take() { return std::move(families_); }

 private:
  std::vector<prometheus::MetricFamily> families_;
};

void AddCounters(const StoreCounters& counters, Families& families) {
  families.Counter("crumb_lookups_total", "Lookups answered.", counters.lookups);
  families.Counter("crumb_lookup_tokens_total", "Tokens of the prompts looked up.",
                   counters.lookup_tokens);
  families.Counter("crumb_hit_tokens_total", "Tokens of them that matched.", counters.hit_tokens);
  families.Counter("crumb_usable_tokens_total", "Tokens of them that could be used.",
                   counters.usable_tokens);
  families.Counter("crumb_quality_trimmed_tokens_total",
                   "Matched tokens given up to keep the recent window in BF16.",
                   counters.trimmed_tokens);
  families.Add(prometheus::MetricType::Counter, "crumb_publishes_total", "Publishes ended.",
               "result",
               {{"committed", counters.publishes_committed},
                {"aborted", counters.publishes_aborted},
                {"refused", counters.publishes_refused}});
  families.Counter("crumb_published_pages_total", "Pages made visible.", counters.published_pages);
  families.Counter("crumb_evicted_pages_total", "Pages evicted.", counters.evicted_pages);
  families.Counter("crumb_evicted_tail_copies_total",
                   "BF16 copies dropped from pages that stayed in INT2.",
                   counters.evicted_tail_copies);
  families.Add(prometheus::MetricType::Counter, "crumb_gpu_copies_total",
               "Copies of pages in the GPU's memory, by what became of them.", "event",
               {{"promoted", counters.copies},
                {"spilled", counters.dropped_copies},
                {"failed", counters.failed_copies},
                {"unplaced", counters.unplaced_copies}});
  families.Counter("crumb_leases_granted_total", "Leases granted.", counters.leases_granted);
  families.Counter("crumb_lease_expired_total", "Leases that ran out instead of being released.",
                   counters.expired_leases);
}

}  // namespace

std::vector<prometheus::MetricFamily> StoreCollector::Collect() const {
  const StoreStatus status = store_.Status();
  Families families;
  AddCounters(status.counters, families);
  using prometheus::MetricType;
  families.Add(MetricType::Gauge, "crumb_pages", "Pages resident, by encoding.", "encoding",
               {{"int2", status.int2_pages}, {"bf16", status.bf16_pages}});
  families.Add(MetricType::Gauge, "crumb_arena_bytes", "Bytes of host memory, by what they are.",
               "kind",
               {{"capacity", status.capacity_bytes},
                {"chunks", status.chunk_bytes},
                {"used", status.used_bytes},
                {"unfinished", status.unfinished_bytes},
                {"quarantined", status.quarantined_bytes}});
  families.Add(MetricType::Gauge, "crumb_gpu_arena_bytes", "Bytes of GPU memory, by what they are.",
               "kind",
               {{"capacity", status.copy_capacity_bytes},
                {"chunks", status.copy_chunk_bytes},
                {"used", status.copy_used_bytes}});
  families.Gauge("crumb_gpu_copies", "Copies of pages in the GPU's memory.", status.copies);
  families.Gauge("crumb_gpu_promotions_waiting", "Prefixes that wait to be copied to the GPU.",
                 status.waiting_promotions);
  families.Gauge("crumb_chunks", "Chunks of the arena.", status.num_chunks);
  families.Gauge("crumb_leases", "Leases held.", status.leases);
  families.Gauge("crumb_leased_pages", "Pages held against eviction.", status.leased_pages);
  families.Gauge("crumb_quarantined_leases", "Leases that ran out and whose pages are kept.",
                 status.quarantined_leases);
  families.Gauge("crumb_publishes", "Publishes unfinished.", status.publishes);
  families.Gauge("crumb_sessions", "Sessions attached.", status.sessions.size());
  families.Gauge("crumb_namespaces", "Namespaces that hold pages or sessions' publishes.",
                 status.namespaces.size());
  families.Gauge("crumb_index_nodes", "Nodes of the radix trees.", status.index_nodes);
  families.Counter("crumb_wrong_secrets_total",
                   "Requests that named a session without its secret, on any socket.",
                   sessions_.wrong_secrets());
  families.Gauge("crumb_draining", "1 while the daemon is draining, else 0.",
                 status.draining ? 1 : 0);
  return families.Take();
}

}  // namespace crumb
