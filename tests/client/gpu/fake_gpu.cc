// SPDX-License-Identifier: Apache-2.0
//
// A GPU in host memory: what client/gpu calls of crumb::gpu, done by the ops' readable twins. So
// that its tests run where there is no GPU. Linked into a test, it takes the place of the library's
// own.
//
// Work is done late, as on a GPU: all of it in the order in which it was enqueued, but only when
// somebody waits for it. So tables that are written again too early, or a page that is used before
// its turn, show. New memory is full of NaN.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "crumb/cuda/append_rows.h"
#include "crumb/cuda/demote_pages.h"
#include "crumb/cuda/device_profile.h"
#include "crumb/cuda/prefill_attention.h"
#include "crumb/cuda/shared_decode.h"
#include "crumb/cuda/split_decode.h"
#include "crumb/cuda/transfer.h"
#include "cuda/launch/demote_finding.h"
#include "proto/base/bfloat16.h"
#include "proto/base/check.h"
#include "proto/base/status_macros.h"
#include "tests/client/gpu/step_graph.h"

namespace crumb {
namespace {

using Work = std::function<void()>;

// Confined to the test's thread.
struct Queue {
  std::deque<Work> waiting;
  uint64_t num_enqueued = 0;
  uint64_t num_done = 0;
  std::vector<Work>* capture = nullptr;
};

Queue& TheQueue() {
  static auto* queue = new Queue;
  return *queue;
}

absl::Status Enqueue(Work work) {
  Queue& queue = TheQueue();
  if (queue.capture != nullptr) {
    queue.capture->push_back(std::move(work));
  } else {
    queue.waiting.push_back(std::move(work));
    ++queue.num_enqueued;
  }
  return absl::OkStatus();
}

void RunUntil(uint64_t end) {
  Queue& queue = TheQueue();
  CRUMB_CHECK(queue.capture == nullptr, "nothing waits in a capture");
  while (queue.num_done < end) {
    const Work work = std::move(queue.waiting.front());
    queue.waiting.pop_front();
    ++queue.num_done;
    work();
  }
}

// An op's twin fails only where the op would have left a finding, or a test is wrong.
void ExpectOk(const absl::Status& status) {
  CRUMB_CHECK(status.ok(), status.ToString().c_str());
}

// By event: the work that it stands behind.
std::map<const OwnGpuEvent*, uint64_t>& Tickets() {
  static auto* tickets = new std::map<const OwnGpuEvent*, uint64_t>;
  return *tickets;
}

struct FakeHeads {
  std::vector<HeadParameters> heads;
  std::deque<std::vector<float>> floats;

  const float* Keep(const float* from, size_t count) {
    return from == nullptr ? nullptr : floats.emplace_back(from, from + count).data();
  }
};

// By DeviceHeads::records.
std::map<const std::byte*, FakeHeads>& Profiles() {
  static auto* profiles = new std::map<const std::byte*, FakeHeads>;
  return *profiles;
}

std::span<const HeadParameters> HeadsOf(const DeviceHeads& heads) {
  const auto found = Profiles().find(heads.records);
  CRUMB_CHECK(found != Profiles().end(), "the profile is alive");
  return found->second.heads;
}

bool IsFinite(const std::byte* row, uint32_t dim) {
  for (uint32_t i = 0; i < dim; ++i) {
    BFloat16 value;
    std::memcpy(&value, row + i * sizeof(value), sizeof(value));
    if (!value.IsFinite()) {
      return false;
    }
  }
  return true;
}

// The first position, as findings count them, of a row with NaN or inf.
bool FindBadRow(const DemotePagesParams& params, uint32_t page, uint64_t* position) {
  *position = uint64_t{page} * params.num_layers * params.num_heads * 2 * kPageTokens;
  for (uint32_t layer = 0; layer < params.num_layers; ++layer) {
    for (uint32_t head = 0; head < params.num_heads; ++head) {
      for (const DeviceRows* rows : {&params.keys, &params.values}) {
        for (uint32_t token = 0; token < kPageTokens; ++token, ++*position) {
          const std::byte* row = rows->pages[page] + rows->offset + layer * rows->layer_stride +
                                 head * rows->head_stride + token * rows->token_stride;
          if (!IsFinite(row, params.heads.head_dim)) {
            return true;
          }
        }
      }
    }
  }
  return false;
}

void Demote(const DemotePagesParams& params) {
  CRUMB_CHECK(params.has_finding_per_page, "as client/gpu asks for them");
  for (uint32_t page = 0; page < params.num_pages; ++page) {
    uint64_t position = 0;
    if (FindBadRow(params, page, &position)) {
      params.finding[page] = gpu::NonFiniteRowFinding(position);
      continue;
    }
    DemotePagesParams one = params;
    one.num_pages = 1;
    one.keys.pages += page;
    one.values.pages += page;
    one.int2.pages += page;
    ExpectOk(DemotePagesReference(one, HeadsOf(params.heads)));
  }
}

class FakeStepGraph : public StepGraph {
 public:
  explicit FakeStepGraph(const std::function<void(GpuStream)>& enqueue) {
    TheQueue().capture = &work_;
    enqueue(nullptr);
    TheQueue().capture = nullptr;
  }
  void Launch(GpuStream /*stream*/) override {
    for (const Work& work : work_) {
      ExpectOk(Enqueue(work));
    }
  }

 private:
  std::vector<Work> work_;
};

}  // namespace

std::unique_ptr<StepGraph> StepGraph::Capture(const std::function<void(GpuStream)>& enqueue) {
  return std::make_unique<FakeStepGraph>(enqueue);
}

absl::StatusOr<GpuDevice> CurrentGpu() {
  return GpuDevice{.index = 0, .name = "pretended", .major = 9};
}

ScopedGpu::ScopedGpu(int /*device*/) {}
ScopedGpu::~ScopedGpu() = default;

absl::StatusOr<std::unique_ptr<OwnGpuStream>> OwnGpuStream::Create() {
  return std::unique_ptr<OwnGpuStream>(new OwnGpuStream);
}
OwnGpuStream::~OwnGpuStream() = default;
absl::Status OwnGpuStream::Wait() const {
  RunUntil(TheQueue().num_enqueued);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<OwnGpuEvent>> OwnGpuEvent::Create() {
  return std::unique_ptr<OwnGpuEvent>(new OwnGpuEvent);
}
OwnGpuEvent::~OwnGpuEvent() {
  Tickets().erase(this);
}
absl::Status OwnGpuEvent::Record(GpuStream /*stream*/) {
  Tickets()[this] = TheQueue().num_enqueued;
  return absl::OkStatus();
}
absl::Status OwnGpuEvent::Delay(GpuStream /*stream*/) const {
  return absl::OkStatus();  // There is one queue.
}
absl::Status OwnGpuEvent::Wait() const {
  const auto found = Tickets().find(this);
  RunUntil(found == Tickets().end() ? 0 : found->second);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<OwnGpuMemory>> OwnGpuMemory::Create(size_t bytes) {
  std::unique_ptr<OwnGpuMemory> memory(new OwnGpuMemory);
  memory->data_ = static_cast<std::byte*>(::operator new (bytes, std::align_val_t{256}));
  memory->bytes_ = bytes;
  std::fill_n(memory->data_, bytes, std::byte{0xff});
  return memory;
}
OwnGpuMemory::~OwnGpuMemory() {
  ::operator delete (data_, std::align_val_t{256});
}

absl::StatusOr<std::unique_ptr<OwnPinnedMemory>> OwnPinnedMemory::Create(size_t bytes) {
  std::unique_ptr<OwnPinnedMemory> memory(new OwnPinnedMemory);
  memory->data_ = static_cast<std::byte*>(::operator new (bytes, std::align_val_t{256}));
  memory->bytes_ = bytes;
  return memory;
}
OwnPinnedMemory::~OwnPinnedMemory() {
  ::operator delete (data_, std::align_val_t{256});
}

absl::Status CopyToGpu(std::byte* target, std::span<const std::byte> source, GpuStream) {
  return Enqueue([=] { std::copy(source.begin(), source.end(), target); });
}
absl::Status CopyFromGpu(std::span<std::byte> target, const std::byte* source, GpuStream) {
  return Enqueue([=] { std::copy_n(source, target.size(), target.begin()); });
}
absl::Status ClearGpu(std::byte* target, size_t bytes, GpuStream) {
  return Enqueue([=] { std::fill_n(target, bytes, std::byte{0}); });
}

absl::StatusOr<std::unique_ptr<DeviceProfile>> DeviceProfile::Create(const Profile& profile) {
  std::vector<HeadParameters> heads;
  const Geometry& geometry = profile.geometry();
  for (uint32_t i = 0; i < geometry.NumHeadBlocks(); ++i) {
    heads.push_back(profile.head(i / geometry.num_kv_heads, i % geometry.num_kv_heads));
  }
  return Create(geometry, heads);
}
absl::StatusOr<std::unique_ptr<DeviceProfile>> DeviceProfile::Create(
    const Geometry& geometry, std::span<const HeadParameters> heads) {
  std::unique_ptr<DeviceProfile> profile(new DeviceProfile);
  profile->memory_ = new std::byte[16];
  profile->heads_ = {.num_layers = geometry.num_layers,
                     .num_kv_heads = geometry.num_kv_heads,
                     .head_dim = geometry.key_dim,
                     .is_aware = HasFeedback(heads[0].codec),
                     .is_tilted = heads[0].codec == CodecId::kOscarInt2Tilted,
                     .records = profile->memory_};
  FakeHeads& fake = Profiles()[profile->memory_];
  const size_t dim = geometry.key_dim;
  for (HeadParameters head : heads) {
    head.key_rotation = fake.Keep(head.key_rotation, dim * dim);
    head.query_rotation = fake.Keep(head.query_rotation, dim * dim);
    head.value_rotation = fake.Keep(head.value_rotation, dim * dim);
    head.key_mean = fake.Keep(head.key_mean, dim);
    head.key_feedback = fake.Keep(head.key_feedback, dim * dim);
    head.key_metric = fake.Keep(head.key_metric, dim * dim);
    head.query_mean = fake.Keep(head.query_mean, dim);
    fake.heads.push_back(head);
  }
  return profile;
}
DeviceProfile::~DeviceProfile() {
  Profiles().erase(memory_);
  delete[] memory_;
}

absl::Status AppendRows(const AppendRowsParams& params, GpuStream /*stream*/) {
  CRUMB_RETURN_IF_ERROR(ValidateAppendRows(params));
  return Enqueue([=] { ExpectOk(AppendRowsReference(params, HeadsOf(params.heads))); });
}
absl::Status TakeAppendRowsProblem(const AppendRowsParams& params, GpuStream /*stream*/) {
  return ValidateAppendRows(params);
}
absl::StatusOr<size_t> SplitDecodeWorkspaceBytes(const SplitDecodeParams& /*params*/) {
  return 256;
}
absl::Status SplitDecode(const SplitDecodeParams& params, GpuStream /*stream*/) {
  CRUMB_RETURN_IF_ERROR(ValidateSplitDecode(params));
  return Enqueue([=] { ExpectOk(SplitDecodeReference(params)); });
}
absl::Status TakeSplitDecodeProblem(const SplitDecodeParams& params, GpuStream /*stream*/) {
  return ValidateSplitDecode(params);
}
absl::StatusOr<size_t> SharedDecodeWorkspaceBytes(const SharedDecodeParams& /*params*/) {
  return 256;
}
absl::Status SharedDecode(const SharedDecodeParams& params, GpuStream /*stream*/) {
  CRUMB_RETURN_IF_ERROR(ValidateSharedDecode(params));
  return Enqueue([=] { ExpectOk(SharedDecodeReference(params)); });
}
absl::Status PrefillAttention(const PrefillAttentionParams& params, GpuStream /*stream*/) {
  CRUMB_RETURN_IF_ERROR(ValidatePrefillAttention(params));
  return Enqueue([=] { ExpectOk(PrefillAttentionReference(params)); });
}
absl::Status TakePrefillAttentionProblem(const PrefillAttentionParams& params,
                                         GpuStream /*stream*/) {
  return ValidatePrefillAttention(params);
}
absl::Status DemotePages(const DemotePagesParams& params, GpuStream /*stream*/) {
  CRUMB_RETURN_IF_ERROR(ValidateDemotePages(params));
  return Enqueue([=] { Demote(params); });
}

}  // namespace crumb
