// SPDX-License-Identifier: Apache-2.0
#include "client/gpu/page_demoter.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "proto/base/status_macros.h"

namespace crumb {
namespace {

constexpr size_t TableBytes(uint32_t max_pages) {
  return size_t{2} * max_pages * sizeof(void*);
}

}  // namespace

absl::StatusOr<std::unique_ptr<PageDemoter>> PageDemoter::Create(const Shape& shape) {
  constexpr size_t kLaunchBytes = TableBytes(kMaxPages) + kMaxPages * sizeof(uint64_t);
  std::unique_ptr<PageDemoter> demoter(new PageDemoter(shape));
  CRUMB_ASSIGN_OR_RETURN(demoter->host_, OwnPinnedMemory::Create(kLaunches * kLaunchBytes));
  CRUMB_ASSIGN_OR_RETURN(demoter->device_, OwnGpuMemory::Create(kLaunches * kLaunchBytes));
  std::fill_n(demoter->host_->data(), demoter->host_->bytes(), std::byte{0});
  CRUMB_ASSIGN_OR_RETURN(const std::unique_ptr<OwnGpuStream> stream, OwnGpuStream::Create());
  CRUMB_RETURN_IF_ERROR(
      ClearGpu(demoter->device_->data(), demoter->device_->bytes(), stream->get()));
  absl::MutexLock lock(&demoter->mutex_);
  for (size_t i = 0; i < kLaunches; ++i) {
    Launch& launch = demoter->launches_[i];
    launch.host = demoter->host_->data() + i * kLaunchBytes;
    launch.device = demoter->device_->data() + i * kLaunchBytes;
    CRUMB_ASSIGN_OR_RETURN(launch.ended, OwnGpuEvent::Create());
  }
  CRUMB_RETURN_IF_ERROR(stream->Wait());
  return demoter;
}

absl::Status PageDemoter::Enqueue(std::span<const GpuPageTable::Demotion> demotions,
                                  GpuStream stream) {
  std::vector<const GpuPageTable::Demotion*> some;
  for (const GpuPageTable::Demotion& demotion : demotions) {
    if (demotion.int2 == nullptr) {
      continue;
    }
    some.push_back(&demotion);
    if (some.size() == kMaxPages) {
      CRUMB_RETURN_IF_ERROR(EnqueueSome(some, stream));
      some.clear();
    }
  }
  return some.empty() ? absl::OkStatus() : EnqueueSome(some, stream);
}

PageDemoter::Launch* PageDemoter::Acquire() {
  absl::MutexLock lock(&mutex_);
  Launch* launch = &launches_[next_++ % kLaunches];
  mutex_.Await(absl::Condition(
      +[](Launch* waited_for) { return !waited_for->is_busy; }, launch));
  launch->is_busy = true;
  return launch;
}

absl::Status PageDemoter::EnqueueSome(std::span<const GpuPageTable::Demotion* const> demotions,
                                      GpuStream stream) {
  Launch* launch = Acquire();
  absl::Status status = launch->ended->Wait();
  if (status.ok()) {
    {
      absl::MutexLock lock(&mutex_);
      ReadFindings(launch);
      launch->int2.clear();
    }
    status = Send(*launch, demotions, stream);
    if (!status.ok()) {
      // What it has enqueued so far reads the tables, too.
      launch->ended->Record(stream).IgnoreError();
    }
  }
  absl::MutexLock lock(&mutex_);
  launch->is_busy = false;
  if (status.ok()) {
    for (const GpuPageTable::Demotion* demotion : demotions) {
      launch->int2.push_back(demotion->int2);
    }
  }
  return status;
}

absl::Status PageDemoter::Send(const Launch& launch,
                               std::span<const GpuPageTable::Demotion* const> demotions,
                               GpuStream stream) const {
  const auto num_pages = static_cast<uint32_t>(demotions.size());
  auto* const from = reinterpret_cast<const std::byte**>(launch.host);
  auto* const to = reinterpret_cast<std::byte**>(launch.host) + num_pages;
  for (uint32_t i = 0; i < num_pages; ++i) {
    from[i] = demotions[i]->bf16;
    to[i] = demotions[i]->int2;
  }
  const size_t findings = TableBytes(kMaxPages);
  const size_t findings_bytes = num_pages * sizeof(uint64_t);
  CRUMB_RETURN_IF_ERROR(CopyToGpu(launch.device, {launch.host, TableBytes(num_pages)}, stream));
  CRUMB_RETURN_IF_ERROR(ClearGpu(launch.device + findings, findings_bytes, stream));
  CRUMB_RETURN_IF_ERROR(DemotePages(Params(launch, num_pages), stream));
  CRUMB_RETURN_IF_ERROR(
      CopyFromGpu({launch.host + findings, findings_bytes}, launch.device + findings, stream));
  return launch.ended->Record(stream);
}

DemotePagesParams PageDemoter::Params(const Launch& launch, uint32_t num_pages) const {
  const Geometry& geometry = shape_.geometry;
  DemotePagesParams params;
  params.heads = shape_.device_heads;
  params.num_pages = num_pages;
  params.num_layers = geometry.num_layers;
  params.num_heads = geometry.num_kv_heads;
  params.rows_are_rotated = true;
  params.keys = {.pages = reinterpret_cast<const std::byte* const*>(launch.device),
                 .offset = Bf16HeadBlock::key_offset(),
                 .layer_stride = geometry.HeadBlockBytes(PageEncoding::kBf16),
                 .head_stride = geometry.HeadRangeBytes(PageEncoding::kBf16),
                 .token_stride = sizeof(uint16_t) * geometry.key_dim};
  params.values = params.keys;
  params.values.offset = geometry.Bf16Block().value_offset();
  params.int2 = {.pages = reinterpret_cast<std::byte* const*>(launch.device) + num_pages,
                 .offset = 0,
                 .layer_stride = geometry.HeadBlockBytes(PageEncoding::kInt2),
                 .head_stride = geometry.HeadRangeBytes(PageEncoding::kInt2)};
  params.finding = reinterpret_cast<uint64_t*>(launch.device + TableBytes(kMaxPages));
  params.has_finding_per_page = true;
  return params;
}

void PageDemoter::ReadFindings(Launch* launch) {
  auto* const findings = reinterpret_cast<uint64_t*>(launch->host + TableBytes(kMaxPages));
  for (size_t i = 0; i < launch->int2.size(); ++i) {
    // The device may be writing it: a finding that has not come is for a later call.
    const std::atomic_ref<uint64_t> word(findings[i]);
    const uint64_t finding = word.load(std::memory_order_relaxed);
    if (finding == 0) {
      continue;
    }
    word.store(0, std::memory_order_relaxed);
    DemotePagesParams params = Params(*launch, static_cast<uint32_t>(launch->int2.size()));
    params.first_head = shape_.heads.first;
    spoiled_.push_back({launch->int2[i], DescribeDemoteFinding(params, finding)});
  }
}

std::vector<PageDemoter::Spoiled> PageDemoter::TakeSpoiled() {
  absl::MutexLock lock(&mutex_);
  for (Launch& launch : launches_) {
    if (!launch.is_busy) {
      ReadFindings(&launch);
    }
  }
  return std::exchange(spoiled_, {});
}

}  // namespace crumb
