// SPDX-License-Identifier: Apache-2.0
#include "daemon/demote/gpu_demoter.h"

#include <algorithm>
#include <array>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/notification.h"

#include "crumb/cuda/checksum_pages.h"
#include "crumb/cuda/demote_pages.h"
#include "crumb/cuda/transfer.h"
#include "proto/base/crc32c.h"
#include "proto/base/status_macros.h"
#include "proto/page/geometry.h"

// shared: the header says by whom.

namespace crumb {
namespace {

// Of one lane: a page of an 8B model, all of its heads, has 9.4 MB of rows.
constexpr size_t kRowsBytes = size_t{16} << 20;
constexpr size_t kCodesBytes = kRowsBytes / 4;  // Two bits and the rows' scales are less.

// What goes up with the rows, and comes down with what became of them.
struct Words {
  std::byte* rows = nullptr;  // Tables of one page for the kernels.
  std::byte* codes = nullptr;
  uint64_t finding = 0;
  std::array<uint32_t, Geometry::kMaxKvHeads> checksums{};  // Of the codes.
  std::array<uint32_t, Geometry::kMaxKvHeads> row_checksums{};
};

DeviceRows RowsAt(const Words* words, const Geometry& geometry, bool of_keys) {
  return {.pages = &words->rows,
          .offset = of_keys ? 0 : geometry.Bf16Block().value_offset(),
          .layer_stride = geometry.HeadBlockBytes(PageEncoding::kBf16),
          .head_stride = geometry.HeadRangeBytes(PageEncoding::kBf16),
          .token_stride = size_t{of_keys ? geometry.key_dim : geometry.value_dim} * 2};
}

}  // namespace

struct GpuDemoter::Buffers {
  std::unique_ptr<OwnGpuStream> stream;
  std::unique_ptr<OwnGpuMemory> rows;
  std::unique_ptr<OwnGpuMemory> codes;  // Of pages without a place in the tier.
  std::unique_ptr<OwnGpuMemory> words;
  std::unique_ptr<OwnPinnedMemory> host_rows;
  std::unique_ptr<OwnPinnedMemory> host_codes;
  std::unique_ptr<OwnPinnedMemory> host_words;

  Words* device_words() const { return reinterpret_cast<Words*>(words->data()); }
  std::span<std::byte> words_on_host() const { return {host_words->data(), sizeof(Words)}; }
  Words& read_words() const { return *reinterpret_cast<Words*>(host_words->data()); }
};

struct GpuDemoter::Prepared {
  absl::Notification is_done;
  // Constant once it is done.
  absl::StatusOr<std::shared_ptr<const DeviceProfile>> profile;
  uint64_t last_use = 0;  // Guarded by the demoter's mutex.
};

class GpuDemoter::GpuLane : public DeviceDemoter::Lane {
 public:
  GpuLane(GpuDemoter& demoter,
          const Geometry& geometry,
          std::shared_ptr<const DeviceProfile> profile,
          const Work& work,
          std::unique_ptr<Buffers> buffers)
      : demoter_(demoter),
        geometry_(geometry),
        profile_(std::move(profile)),
        work_(work),
        buffers_(std::move(buffers)),
        bf16_bytes_(geometry.HeadRangeBytes(PageEncoding::kBf16)),
        int2_bytes_(geometry.HeadRangeBytes(PageEncoding::kInt2)) {}
  ~GpuLane() override {
    buffers_->stream->Wait().IgnoreError();  // Whoever waited for it has been told.
    demoter_.GiveBack(std::move(buffers_));
  }
  GpuLane(const GpuLane&) = delete;
  GpuLane& operator=(const GpuLane&) = delete;

  absl::Status Start() {
    Words& words = buffers_->read_words();
    words = {.rows = buffers_->rows->data(),
             .codes = work_.copy.has_value() ? demoter_.tier_.Address(*work_.copy)
                                             : buffers_->codes->data()};
    return CopyToGpu(buffers_->words->data(), buffers_->words_on_host(), buffers_->stream->get());
  }

  std::span<std::byte> Rows(uint32_t index) override {
    return std::span(buffers_->host_rows->data() + index * bf16_bytes_, bf16_bytes_);
  }

  absl::Status Send(uint32_t index) override {
    const ScopedGpu current(demoter_.tier_.device());
    CRUMB_RETURN_IF_ERROR(current.status());
    return CopyToGpu(buffers_->rows->data() + index * bf16_bytes_, Rows(index),
                     buffers_->stream->get());
  }

  absl::Status SendHeld(uint32_t index, std::span<const std::byte> rows, uint32_t crc32c) override {
    const ScopedGpu current(demoter_.tier_.device());
    CRUMB_RETURN_IF_ERROR(current.status());
    expected_.push_back(crc32c);
    return CopyToGpu(buffers_->rows->data() + index * bf16_bytes_, rows, buffers_->stream->get());
  }

  absl::Status Finish(std::span<std::byte> int2, std::span<uint32_t> head_crc32c) override {
    const ScopedGpu current(demoter_.tier_.device());
    CRUMB_RETURN_IF_ERROR(current.status());
    const std::span<std::byte> codes = std::span(buffers_->host_codes->data(), int2.size());
    CRUMB_RETURN_IF_ERROR(Enqueue(codes));
    CRUMB_RETURN_IF_ERROR(buffers_->stream->Wait());
    const Words& words = buffers_->read_words();
    if (!std::equal(expected_.begin(), expected_.end(), words.row_checksums.begin())) {
      return absl::AbortedError("the GPU read rows with other checksums than were announced");
    }
    if (words.finding != 0) {
      return absl::InvalidArgumentError("the GPU found rows with NaN or inf");
    }
    for (uint32_t i = 0; i < work_.heads.count; ++i) {
      head_crc32c[i] = CopyWithCrc32c(codes.subspan(i * int2_bytes_, int2_bytes_),
                                      int2.subspan(i * int2_bytes_, int2_bytes_));
      if (head_crc32c[i] != words.checksums[i]) {
        return absl::DataLossError(absl::StrFormat(
            "KV head %u of a page demoted on the GPU: checksum %08x there, %08x over what came "
            "back",
            work_.heads.first + i, words.checksums[i], head_crc32c[i]));
      }
    }
    return absl::OkStatus();
  }

 private:
  absl::Status Enqueue(std::span<std::byte> codes) {
    const GpuStream stream = buffers_->stream->get();
    Words* const words = buffers_->device_words();
    CRUMB_RETURN_IF_ERROR(
        DemotePages({.heads = profile_->heads(),
                     .num_pages = 1,
                     .first_layer = 0,
                     .num_layers = geometry_.num_layers,
                     .first_head = work_.heads.first,
                     .num_heads = work_.heads.count,
                     .rows_are_rotated = work_.rows_are_rotated,
                     .keys = RowsAt(words, geometry_, /*of_keys=*/true),
                     .values = RowsAt(words, geometry_, /*of_keys=*/false),
                     .int2 = {.pages = &words->codes,
                              .offset = 0,
                              .layer_stride = geometry_.HeadBlockBytes(PageEncoding::kInt2),
                              .head_stride = int2_bytes_},
                     .finding = &words->finding},
                    stream));
    CRUMB_RETURN_IF_ERROR(Checksum(&words->codes, int2_bytes_, words->checksums.data()));
    if (!expected_.empty()) {
      CRUMB_RETURN_IF_ERROR(Checksum(&words->rows, bf16_bytes_, words->row_checksums.data()));
    }
    CRUMB_RETURN_IF_ERROR(CopyFromGpu(codes, buffers_->read_words().codes, stream));
    return CopyFromGpu(buffers_->words_on_host(), buffers_->words->data(), stream);
  }

  // Of each head's range of one of the two tables.
  absl::Status Checksum(std::byte* const* table, size_t range_bytes, uint32_t* checksums) {
    return ChecksumPages({.num_pages = 1,
                          .num_ranges = work_.heads.count,
                          .pages = table,
                          .offset = 0,
                          .range_stride = range_bytes,
                          .range_bytes = range_bytes,
                          .checksums = checksums},
                         buffers_->stream->get());
  }

  GpuDemoter& demoter_;
  const Geometry geometry_;
  const std::shared_ptr<const DeviceProfile> profile_;
  const Work work_;
  std::unique_ptr<Buffers> buffers_;
  const size_t bf16_bytes_;  // Of a head.
  const size_t int2_bytes_;
  std::vector<uint32_t> expected_;  // Of held rows, by head.
};

// Takes its bytes of the bound, of which `total` is in use, until it is destroyed.
struct GpuDemoter::Held {
  Held(size_t size, std::shared_ptr<std::atomic<size_t>> in_use)
      : bytes(size), total(std::move(in_use)) {
    total->fetch_add(bytes);
  }
  ~Held() { total->fetch_sub(bytes); }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

  const size_t bytes;
  const std::shared_ptr<std::atomic<size_t>> total;
  std::shared_ptr<const void> hold;
};

std::shared_ptr<const void> GpuDemoter::Hold(std::span<const std::byte> memory) {
  const auto held = std::make_shared<Held>(memory.size(), held_bytes_);
  if (held_bytes_->load() <= kMaxHeldBytes) {
    held->hold = tier_.Hold(memory);
  }
  return held->hold == nullptr ? nullptr : held;
}

absl::StatusOr<std::unique_ptr<GpuDemoter>> GpuDemoter::Create(const GpuTier& tier,
                                                               uint32_t num_lanes) {
  std::unique_ptr<GpuDemoter> demoter(new GpuDemoter(tier));
  const ScopedGpu current(tier.device());
  CRUMB_RETURN_IF_ERROR(current.status());
  for (uint32_t i = 0; i < num_lanes; ++i) {
    CRUMB_ASSIGN_OR_RETURN(std::unique_ptr<Buffers> buffers, demoter->MakeBuffers());
    demoter->GiveBack(std::move(buffers));
  }
  return demoter;
}

GpuDemoter::GpuDemoter(const GpuTier& tier)
    : tier_(tier), held_bytes_(std::make_shared<std::atomic<size_t>>(0)) {}

GpuDemoter::~GpuDemoter() = default;

absl::StatusOr<std::unique_ptr<GpuDemoter::Buffers>> GpuDemoter::MakeBuffers() const {
  auto buffers = std::make_unique<Buffers>();
  CRUMB_ASSIGN_OR_RETURN(buffers->stream, OwnGpuStream::Create());
  CRUMB_ASSIGN_OR_RETURN(buffers->rows, OwnGpuMemory::Create(kRowsBytes));
  CRUMB_ASSIGN_OR_RETURN(buffers->codes, OwnGpuMemory::Create(kCodesBytes));
  CRUMB_ASSIGN_OR_RETURN(buffers->words, OwnGpuMemory::Create(sizeof(Words)));
  CRUMB_ASSIGN_OR_RETURN(buffers->host_rows, OwnPinnedMemory::Create(kRowsBytes));
  CRUMB_ASSIGN_OR_RETURN(buffers->host_codes, OwnPinnedMemory::Create(kCodesBytes));
  CRUMB_ASSIGN_OR_RETURN(buffers->host_words, OwnPinnedMemory::Create(sizeof(Words)));
  return buffers;
}

std::unique_ptr<GpuDemoter::Buffers> GpuDemoter::TakeBuffers() {
  absl::MutexLock lock(&mutex_);
  if (free_.empty()) {
    return nullptr;
  }
  std::unique_ptr<Buffers> buffers = std::move(free_.back());
  free_.pop_back();
  return buffers;
}

void GpuDemoter::GiveBack(std::unique_ptr<Buffers> buffers) {
  absl::MutexLock lock(&mutex_);
  free_.push_back(std::move(buffers));
}

uint32_t GpuDemoter::MaxHeads(const Profile& profile) const {
  const Geometry& geometry = profile.geometry();
  if (!tier_.CheckGeometry(geometry).ok() || !HasDemotionKernels(profile)) {
    return 0;
  }
  const size_t of_rows = kRowsBytes / geometry.HeadRangeBytes(PageEncoding::kBf16);
  const size_t of_codes = kCodesBytes / geometry.HeadRangeBytes(PageEncoding::kInt2);
  return static_cast<uint32_t>(std::min({of_rows, of_codes, size_t{Geometry::kMaxKvHeads}}));
}

void GpuDemoter::MakeRoomLocked() {
  while (profiles_.size() >= kMaxProfiles) {
    auto oldest = profiles_.begin();
    for (auto entry = profiles_.begin(); entry != profiles_.end(); ++entry) {
      oldest = entry->second->last_use < oldest->second->last_use ? entry : oldest;
    }
    profiles_.erase(oldest);
  }
}

absl::StatusOr<std::shared_ptr<const DeviceProfile>> GpuDemoter::OnDevice(const Profile& profile) {
  std::shared_ptr<Prepared> prepared;
  std::shared_ptr<Prepared> ours;
  {
    absl::MutexLock lock(&mutex_);
    if (const auto found = profiles_.find(profile.id()); found != profiles_.end()) {
      prepared = found->second;
    } else {
      MakeRoomLocked();
      prepared = ours = std::make_shared<Prepared>();
      profiles_[profile.id()] = ours;
    }
    prepared->last_use = ++uses_;
  }
  if (ours == nullptr) {
    prepared->is_done.WaitForNotification();
    return prepared->profile;
  }
  auto made = DeviceProfile::Create(profile);
  if (made.ok()) {
    ours->profile = std::shared_ptr<const DeviceProfile>(*std::move(made));
  } else {
    ours->profile = made.status();
    absl::MutexLock lock(&mutex_);  // The next page tries again.
    const auto found = profiles_.find(profile.id());
    if (found != profiles_.end() && found->second == ours) {
      profiles_.erase(found);
    }
  }
  ours->is_done.Notify();
  return ours->profile;
}

void GpuDemoter::Prepare(const Profile& profile) {
  const ScopedGpu current(tier_.device());
  if (current.status().ok() && MaxHeads(profile) > 0) {
    OnDevice(profile).status().IgnoreError();  // Open says so, to who asks.
  }
}

absl::StatusOr<std::unique_ptr<DeviceDemoter::Lane>> GpuDemoter::Open(const Profile& profile,
                                                                      const Work& work) {
  const ScopedGpu current(tier_.device());
  CRUMB_RETURN_IF_ERROR(current.status());
  CRUMB_ASSIGN_OR_RETURN(std::shared_ptr<const DeviceProfile> on_device, OnDevice(profile));
  std::unique_ptr<Buffers> buffers = TakeBuffers();
  if (buffers == nullptr) {
    return absl::ResourceExhaustedError(
        "all lanes of the GPU's demotion are taken, which are as many as threads demote");
  }
  auto lane = std::make_unique<GpuLane>(*this, profile.geometry(), std::move(on_device), work,
                                        std::move(buffers));
  CRUMB_RETURN_IF_ERROR(lane->Start());
  return lane;
}

}  // namespace crumb
