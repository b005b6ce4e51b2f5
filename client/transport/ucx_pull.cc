// SPDX-License-Identifier: Apache-2.0
#include "client/transport/ucx_pull.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "crumb/cuda/transfer.h"
#include "proto/base/check.h"
#include "proto/base/crc32c.h"
#include "proto/base/status_macros.h"

namespace crumb {
namespace {

std::vector<PullEntry> EntriesOf(const LeasedPrefix& prefix) {
  std::vector<PullEntry> entries;
  for (uint32_t page = 0; page < prefix.pages.size(); ++page) {
    for (const PageEncoding encoding : {PageEncoding::kInt2, PageEncoding::kBf16}) {
      if (const BlockPlace& place = prefix.pages[page].of(encoding); place.present()) {
        entries.push_back({page, encoding, {}, place.generation.value()});
      }
    }
  }
  return entries;
}

std::vector<PageEncoding> EncodingsOf(std::span<const PullEntry> entries) {
  std::vector<PageEncoding> encodings;
  encodings.reserve(entries.size());
  for (const PullEntry& entry : entries) {
    encodings.push_back(entry.encoding);
  }
  return encodings;
}

// A buffer's registration with the GPU, kept as long as its memory: registering costs 58 ms a GiB.
class GpuRegistration : public BufferPool::Companion {
 public:
  explicit GpuRegistration(std::unique_ptr<HostRegistration> registration)
      : registration_(std::move(registration)) {}

 private:
  const std::unique_ptr<HostRegistration> registration_;
};

// A message costs as much as copying so many bytes more.
constexpr size_t kMinImageBytes = size_t{64} << 10;
constexpr uint32_t kLayersAnOrderedOne = 32;

}  // namespace

uint32_t UcxPull::DefaultOrderedLayers(const Geometry& geometry,
                                       std::span<const PageEncoding> encodings) {
  const bool are_messages = std::all_of(encodings.begin(), encodings.end(), [&](auto encoding) {
    return geometry.PageBytes(encoding) >= kMinImageBytes;
  });
  return are_messages ? std::max(1u, geometry.num_layers / kLayersAnOrderedOne)
                      : geometry.num_layers;
}

absl::StatusOr<std::shared_ptr<UcxPull>> UcxPull::Create(const SessionInfo& session,
                                                         const LeasedPrefix& prefix,
                                                         BufferPool& buffers,
                                                         PullPlan::Cut cut,
                                                         absl::Time deadline,
                                                         const Clock& clock) {
  std::vector<PullEntry> entries = EntriesOf(prefix);
  if (entries.empty() || entries.size() > kMaxPullEntries) {
    return absl::InvalidArgumentError(
        absl::StrCat("pull of ", entries.size(), " pages: must be 1 to ", kMaxPullEntries));
  }
  Geometry geometry = session.profile->geometry();
  geometry.num_kv_heads = session.heads.count;
  std::vector<PageEncoding> encodings = EncodingsOf(entries);
  if (cut.ordered_layers == 0) {
    cut.ordered_layers = DefaultOrderedLayers(geometry, encodings);
  }
  PullPlan plan(geometry, std::move(encodings), cut);
  CRUMB_ASSIGN_OR_RETURN(BufferPool::Buffer buffer, buffers.Take(plan.total_bytes()));
  // shared: by the engine's handle, the list of open pulls, and transfers that have not ended.
  std::shared_ptr<UcxPull> pull(
      new UcxPull(session, prefix, std::move(entries), std::move(plan), std::move(buffer)));
  const size_t num_pieces = pull->plan_.num_pieces();
  pull->deadline_ = deadline;
  pull->clock_ = &clock;
  const absl::MutexLock lock(&pull->mutex_);
  pull->is_taken_.resize(num_pieces);
  pull->has_landed_.resize(num_pieces);
  pull->missing_.resize(pull->entries_.size());
  for (size_t piece = pull->plan_.num_gathered_pieces(); piece < num_pieces; ++piece) {
    ++pull->missing_[pull->plan_.PieceAt(piece).entry];
  }
  pull->num_to_add_ =
      1 + (num_pieces > pull->plan_.num_gathered_pieces() ? pull->entries_.size() : 0);
  return pull;
}

UcxPull::UcxPull(const SessionInfo& session,
                 const LeasedPrefix& prefix,
                 std::vector<PullEntry> entries,
                 PullPlan plan,
                 BufferPool::Buffer buffer)
    : profile_id_(session.profile->id()),
      namespace_id_(prefix.namespace_id),
      heads_(session.heads),
      lease_(prefix.lease),
      entries_(std::move(entries)),
      plan_(std::move(plan)),
      int2_entries_(prefix.pages.size(), kNoEntry),
      bf16_entries_(prefix.pages.size(), kNoEntry),
      buffer_(std::move(buffer)),
      ordered_checksums_(entries_.size() * heads_.count),
      image_checksums_(entries_.size() * heads_.count) {
  for (uint32_t entry = 0; entry < entries_.size(); ++entry) {
    auto& of_pages =
        entries_[entry].encoding == PageEncoding::kInt2 ? int2_entries_ : bf16_entries_;
    of_pages[entries_[entry].page_idx] = entry;
  }
}

PullMessage UcxPull::request(uint64_t request_id) const {
  PullMessage message;
  message.preamble = {.op = PullOp::kPull, .request_id = request_id};
  message.lease_id = lease_.value();
  message.num_entries = static_cast<uint32_t>(entries_.size());
  message.chunk_bytes = plan_.cut().chunk_bytes;
  message.geometry = plan_.geometry();
  message.ordered_layers = plan_.cut().ordered_layers;
  return message;
}

absl::StatusOr<std::span<std::byte>> UcxPull::TargetOf(const ChunkMessage& chunk, size_t bytes) {
  // The decoder has checked that the offset is below the message's own total.
  const PullPlan::Pieces pieces =
      chunk.total_bytes == total_bytes() ? plan_.PiecesIn(chunk.offset, bytes) : PullPlan::Pieces{};
  const absl::MutexLock lock(&mutex_);
  const auto first = is_taken_.begin() + static_cast<ptrdiff_t>(pieces.begin);
  const auto last = is_taken_.begin() + static_cast<ptrdiff_t>(pieces.end);
  if (first == last || std::find(first, last, true) != last) {
    return absl::DataLossError(absl::StrCat(
        "pull: the daemon sent ", bytes, " bytes at ", chunk.offset, " of ", chunk.total_bytes,
        ", which are no pieces of the ", total_bytes(), " bytes asked for, or came twice"));
  }
  std::fill(first, last, true);
  return buffer_.bytes().subspan(chunk.offset, bytes);
}

void UcxPull::Landed(const ChunkMessage& chunk, size_t bytes) {
  const PullPlan::Pieces pieces = plan_.PiecesIn(chunk.offset, bytes);
  std::vector<uint32_t> complete;  // Entries whose images are.
  {
    const absl::MutexLock lock(&mutex_);
    for (size_t piece = pieces.begin; piece < pieces.end; ++piece) {
      has_landed_[piece] = true;
      const uint32_t entry = plan_.PieceAt(piece).entry;
      if (entry != PullPlan::kGathered && --missing_[entry] == 0) {
        complete.push_back(entry);
      }
    }
    while (num_landed_ < has_landed_.size() && has_landed_[num_landed_]) {
      ++num_landed_;
    }
    landed_bytes_ =
        num_landed_ < has_landed_.size() ? plan_.PieceAt(num_landed_).offset : total_bytes();
    if (!failure_.ok()) {
      return;
    }
  }
  for (const uint32_t entry : complete) {
    AddImage(entry);
  }
  EndAdding(complete.size() + (AddOrderedLayers() ? 1 : 0));
}

void UcxPull::Fail(const absl::Status& status) {
  const absl::MutexLock lock(&mutex_);
  if (failure_.ok() && !verified_) {
    failure_ = status;
  }
}

bool UcxPull::IsOpen() const {
  const absl::MutexLock lock(&mutex_);
  return failure_.ok() && landed_bytes_ < total_bytes();
}

size_t UcxPull::landed_bytes() const {
  const absl::MutexLock lock(&mutex_);
  return landed_bytes_;
}

const PageHeader& UcxPull::HeaderOf(uint32_t entry) const {
  // The daemon wrote the bytes of a header here, and a header may have any bytes.
  return *reinterpret_cast<const PageHeader*>(&buffer_.bytes()[PullPlan::HeaderOffset(entry)]);
}

absl::Status UcxPull::CheckHeaders() const {
  for (uint32_t entry = 0; entry < entries_.size(); ++entry) {
    const PullEntry& wanted = entries_[entry];
    const PageHeader& header = HeaderOf(entry);
    CRUMB_RETURN_IF_ERROR(
        CheckPageHeader(header, {profile_id_, namespace_id_, wanted.encoding,
                                 Generation(wanted.generation), PageIdx(wanted.page_idx)}));
    if ((header.heads_present & heads_.Mask()) != heads_.Mask()) {
      return absl::FailedPreconditionError(absl::StrFormat(
          "page at token %u has KV heads %x, this rank needs %x; look the prefix up again",
          header.first_token, header.heads_present, heads_.Mask()));
    }
  }
  return absl::OkStatus();
}

bool UcxPull::AddOrderedBlocks(size_t landed) {
  for (; next_layer_ < ordered_layers(); ++next_layer_, next_entry_ = 0) {
    for (; next_entry_ < entries_.size(); ++next_entry_) {
      const size_t bytes = plan_.block_bytes(next_entry_);
      if (plan_.BlockOffset(next_layer_, next_entry_, heads_.count - 1) + bytes > landed) {
        return false;
      }
      for (uint32_t head = 0; head < heads_.count; ++head) {
        const size_t offset = plan_.BlockOffset(next_layer_, next_entry_, head);
        uint32_t& checksum = ordered_checksums_[size_t{next_entry_} * heads_.count + head];
        checksum = Crc32c(buffer_.bytes().subspan(offset, bytes), checksum);
      }
    }
  }
  return true;
}

bool UcxPull::AddOrderedLayers() {
  const size_t all = plan_.BytesUntil(ordered_layers() - 1);
  bool has_added_all = false;
  size_t landed = 0;  // Those that this thread has added.
  while (true) {
    {
      const absl::MutexLock lock(&mutex_);
      if (landed != 0) {
        is_adding_ = false;
      }
      if (is_adding_ || added_bytes_ == std::min(landed_bytes_, all)) {
        return has_added_all;
      }
      is_adding_ = true;
      landed = added_bytes_ = std::min(landed_bytes_, all);
    }
    if (!headers_checked_ && landed >= plan_.headers_bytes()) {
      headers_checked_ = true;
      if (const absl::Status status = CheckHeaders(); !status.ok()) {
        Fail(status);
      }
    }
    has_added_all = AddOrderedBlocks(landed);
  }
}

void UcxPull::AddImage(uint32_t entry) {
  const uint32_t first = ordered_layers();
  const size_t bytes = (plan_.geometry().num_layers - first) * plan_.block_bytes(entry);
  for (uint32_t head = 0; head < heads_.count; ++head) {
    image_checksums_[size_t{entry} * heads_.count + head] =
        Crc32c(buffer_.bytes().subspan(plan_.BlockOffset(first, entry, head), bytes));
  }
}

absl::Status UcxPull::CheckChecksums() const {
  const uint32_t num_in_images = plan_.geometry().num_layers - ordered_layers();
  const Crc32cJoin joins[] = {
      Crc32cJoin(num_in_images * plan_.geometry().HeadBlockBytes(PageEncoding::kInt2)),
      Crc32cJoin(num_in_images * plan_.geometry().HeadBlockBytes(PageEncoding::kBf16))};
  for (uint32_t entry = 0; entry < entries_.size(); ++entry) {
    const PageHeader& header = HeaderOf(entry);
    const Crc32cJoin& join = joins[plan_.encoding(entry) == PageEncoding::kInt2 ? 0 : 1];
    for (uint32_t head = 0; head < heads_.count; ++head) {
      const size_t idx = size_t{entry} * heads_.count + head;
      const uint32_t found = join(ordered_checksums_[idx], image_checksums_[idx]);
      const uint32_t expected = header.head_crc32c[heads_.first + head];
      if (found != expected) {
        return absl::DataLossError(absl::StrFormat(
            "pulled page at token %u, KV head %u: checksum of the bytes is %08x, the daemon says "
            "%08x; its memory was reused or the bytes changed on their way, look the prefix up "
            "again",
            header.first_token, heads_.first + head, found, expected));
      }
    }
  }
  return absl::OkStatus();
}

void UcxPull::EndAdding(size_t count) {
  {
    const absl::MutexLock lock(&mutex_);
    num_to_add_ -= count;
    if (count == 0 || num_to_add_ > 0 || !failure_.ok()) {
      return;
    }
  }
  const absl::Status status = CheckChecksums();
  const absl::MutexLock lock(&mutex_);
  if (failure_.ok()) {
    failure_ = status;
    verified_ = status.ok();
  }
}

const std::byte* UcxPull::HeadBlock(PageIdx page,
                                    PageEncoding encoding,
                                    uint32_t layer,
                                    uint32_t kv_head) const {
  const auto& of_pages = encoding == PageEncoding::kInt2 ? int2_entries_ : bf16_entries_;
  if (page.value() >= of_pages.size() || of_pages[page.value()] == kNoEntry ||
      kv_head < heads_.first || kv_head - heads_.first >= heads_.count) {
    return nullptr;
  }
  CRUMB_DCHECK(layer < plan_.geometry().num_layers, "a layer of the model");
  return &buffer_.bytes()[plan_.BlockOffset(layer, of_pages[page.value()], kv_head - heads_.first)];
}

absl::Status UcxPull::RegisterWithGpu() {
  const absl::MutexLock lock(&registering_);
  if (buffer_.companion() == nullptr) {
    CRUMB_ASSIGN_OR_RETURN(auto registration,
                           HostRegistration::Create(buffer_.bytes(), /*is_read_only=*/false));
    buffer_.SetCompanion(std::make_unique<GpuRegistration>(std::move(registration)));
  }
  return absl::OkStatus();
}

absl::Status UcxPull::WaitUntil(const absl::Condition& reached) {
  const absl::MutexLock lock(&mutex_);
  if (!mutex_.AwaitWithTimeout(reached, deadline_ - clock_->Now()) && failure_.ok()) {
    failure_ = absl::DeadlineExceededError(
        absl::StrCat("pull: ", landed_bytes_, " of ", total_bytes(), " bytes came before its end"));
  }
  return failure_;
}

absl::Status UcxPull::WaitForLayer(uint32_t layer) {
  CRUMB_CHECK(layer < plan_.geometry().num_layers, "a layer of the model");
  const size_t bytes = plan_.BytesUntil(layer);
  const auto has_landed = [this, bytes]()
                              ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return HasLanded(bytes); };
  return WaitUntil(absl::Condition(&has_landed));
}

absl::Status UcxPull::Validate() {
  return WaitUntil(absl::Condition(this, &UcxPull::IsSettled));
}

}  // namespace crumb
