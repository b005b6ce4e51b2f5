// SPDX-License-Identifier: Apache-2.0
#include "client/session/publisher.h"

#include <algorithm>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

#include "proto/base/crc32c.h"
#include "proto/base/status_macros.h"

namespace crumb {
namespace {

// Head blocks are read by vector loads.
constexpr size_t kImageAlignment = 64;

size_t Align(size_t bytes) {
  return (bytes + kImageAlignment - 1) / kImageAlignment * kImageAlignment;
}

// What a daemon keeps of ended publishes over UCX for the next: more had to be touched anew.
constexpr size_t kMaxUcxBytes = size_t{64} << 20;

// Of each of the rank's heads in an image of just them.
std::vector<uint32_t> Checksums(std::span<const std::byte> image, uint32_t num_heads) {
  const size_t range_bytes = image.size() / num_heads;
  std::vector<uint32_t> checksums(num_heads);
  for (uint32_t head = 0; head < num_heads; ++head) {
    checksums[head] = Crc32c(image.subspan(head * range_bytes, range_bytes));
  }
  return checksums;
}

}  // namespace

absl::StatusOr<std::vector<PlannedPage>> PlanPublish(const MissingPages& missing,
                                                     const PageExporter& exporter,
                                                     const Windows& windows) {
  const uint32_t sink_pages = windows.sink_tokens / kPageTokens;
  std::vector<PageIdx> pages;
  std::set_union(missing.int2.begin(), missing.int2.end(), missing.bf16.begin(), missing.bf16.end(),
                 std::back_inserter(pages));
  std::vector<PlannedPage> plan;
  plan.reserve(pages.size());
  for (const PageIdx page : pages) {
    const bool wants_bf16 = std::binary_search(missing.bf16.begin(), missing.bf16.end(), page);
    const bool wants_int2 = std::binary_search(missing.int2.begin(), missing.int2.end(), page);
    const bool is_sink = page.value() < sink_pages;
    const bool has_bf16 = exporter.HasPage(page, PageEncoding::kBf16);
    const bool has_int2 = exporter.HasPage(page, PageEncoding::kInt2);
    if (has_bf16 && (wants_bf16 || !has_int2)) {
      plan.push_back({page, PageEncoding::kBf16, wants_bf16 && !is_sink});
    } else if (wants_int2 && has_int2) {
      plan.push_back({page, PageEncoding::kInt2, false});
    } else if (wants_int2 || is_sink) {
      return absl::FailedPreconditionError(
          absl::StrCat("page ", page.value(), " is missing at the daemon, and the sequence of ",
                       exporter.length(), " tokens does not hold it in the encoding that is needed",
                       is_sink ? " (BF16: it is of the sink)" : ""));
    }
    // Otherwise only a tail's BF16 rows are missing, and gone here as well: the daemon does
    // without.
  }
  return plan;
}

std::vector<std::vector<PlannedPage>> CutIntoParts(std::vector<PlannedPage> plan,
                                                   const Geometry& geometry,
                                                   uint32_t num_heads,
                                                   size_t max_bytes) {
  std::stable_partition(plan.begin(), plan.end(), [](const PlannedPage& page) {
    return page.encoding == PageEncoding::kBf16;
  });
  const auto bytes_of = [&](const PlannedPage& page) {
    return Align(num_heads * geometry.HeadRangeBytes(page.encoding));
  };
  for (const PlannedPage& page : plan) {
    max_bytes = std::max(max_bytes, bytes_of(page));
  }
  std::vector<std::vector<PlannedPage>> parts;
  size_t left_bytes = 0;  // In the last part.
  for (const PlannedPage& page : plan) {
    const size_t bytes = bytes_of(page);
    if (parts.empty() || bytes > left_bytes) {
      parts.emplace_back();
      left_bytes = max_bytes;
    }
    parts.back().push_back(page);
    left_bytes -= bytes;
  }
  for (std::vector<PlannedPage>& part : parts) {
    std::sort(part.begin(), part.end(),
              [](const PlannedPage& a, const PlannedPage& b) { return a.page < b.page; });
  }
  return parts;
}

size_t Publisher::PageBytes(PageEncoding encoding) const {
  return session_->info().heads.count *
         session_->info().profile->geometry().HeadRangeBytes(encoding);
}

size_t Publisher::LargestBytes(const std::vector<Part>& parts) const {
  size_t largest = 0;
  for (const Part& part : parts) {
    size_t bytes = 0;
    for (const PlannedPage& page : part) {
      bytes += Align(PageBytes(page.encoding));
    }
    largest = std::max(largest, bytes);
  }
  return largest;
}

absl::StatusOr<PublishResult> Publisher::Run(const std::string& context_key,
                                             std::span<const uint32_t> tokens,
                                             absl::Time deadline) {
  ControlPlane& control = session_->control();
  CRUMB_ASSIGN_OR_RETURN(const MissingPages missing,
                         control.BeginPublish(context_key, tokens, deadline));
  absl::Cleanup abort = [&] {
    // At the session's end the daemon drops it anyway, so this may fail.
    control.AbortPublish(missing.publish, clock_.Now() + absl::Seconds(1)).IgnoreError();
  };
  const Profile& profile = *session_->info().profile;
  CRUMB_ASSIGN_OR_RETURN(std::vector<PlannedPage> plan,
                         PlanPublish(missing, pages_, profile.windows()));
  for (const PlannedPage& page : plan) {
    result_.tail_pages += page.is_tail ? 1 : 0;
    result_.bytes_sent += PageBytes(page.encoding);
  }
  CRUMB_RETURN_IF_ERROR(
      HandOver(missing.publish,
               CutIntoParts(std::move(plan), profile.geometry(), session_->info().heads.count,
                            options_.max_part_bytes),
               deadline));
  std::move(abort).Cancel();
  return result_;
}

absl::Status Publisher::HandOver(PublishId publish,
                                 const std::vector<Part>& parts,
                                 absl::Time deadline) {
  if (parts.empty()) {
    return Commit({.publish = publish, .staged = {}}, deadline);
  }
  const bool by_map = session_->planes().map != nullptr;
  const size_t max_bytes =
      by_map ? options_.max_staging_bytes : std::min(options_.max_staging_bytes, kMaxUcxBytes);
  const size_t slot_bytes = LargestBytes(parts);
  const size_t num_slots = std::min({parts.size(), options_.writes.num_slots,
                                     std::max<size_t>(2, max_bytes / slot_bytes),
                                     std::max<size_t>(1, kMaxStagingBytes / slot_bytes)});
  return by_map ? HandOverByMap(publish, parts, num_slots, deadline)
                : HandOverByUcx(publish, parts, num_slots, deadline);
}

absl::Status Publisher::HandOverByMap(PublishId publish,
                                      const std::vector<Part>& parts,
                                      size_t num_slots,
                                      absl::Time deadline) {
  MapTransport& map = *session_->planes().map;
  const size_t slot_bytes = LargestBytes(parts);
  CRUMB_ASSIGN_OR_RETURN(const std::span<std::byte> staging,
                         map.AcquireStaging(num_slots * slot_bytes, deadline));
  if (pages_.wants_registered_memory()) {
    map.RegisterStaging().IgnoreError();  // Copies work without, too, if slower.
  }
  bool daemon_may_read = false;
  absl::Cleanup release = [&] { map.ReleaseStaging(/*discard=*/daemon_may_read); };
  const auto stage = [&](const Part& part, size_t slot) -> absl::StatusOr<CommitParams> {
    CommitParams params{.publish = publish, .staged = {}};
    const size_t offset = slot * slot_bytes;
    const std::span<std::byte> place = staging.subspan(offset, slot_bytes);
    map.TouchStaging(place);
    CRUMB_ASSIGN_OR_RETURN(params.staged, FillStaging(part, place, deadline));
    for (StagedImage& image : params.staged) {
      image.offset += offset;
    }
    return params;
  };
  return WriteAll(publish, parts, num_slots, stage, deadline, &daemon_may_read);
}

absl::Status Publisher::HandOverByUcx(PublishId publish,
                                      const std::vector<Part>& parts,
                                      size_t num_slots,
                                      absl::Time deadline) {
  const size_t slot_bytes = LargestBytes(parts);
  std::vector<std::byte> buffer(slot_bytes);  // Free again once it has been sent.
  const auto stage = [&](const Part& part, size_t slot) -> absl::StatusOr<CommitParams> {
    CommitParams params{.publish = publish, .staged = {}, .over_ucx = true};
    CRUMB_ASSIGN_OR_RETURN(params.staged, FillStaging(part, buffer, deadline));
    const size_t begin = slot * slot_bytes;
    size_t end = begin;
    std::vector<OutgoingPage> outgoing;
    for (StagedImage& page : params.staged) {
      const size_t bytes = PageBytes(page.encoding);
      outgoing.push_back({.page = page.page,
                          .encoding = page.encoding,
                          .image = std::span(buffer).subspan(page.offset, bytes)});
      page.offset = end;  // There they lie back to back.
      end += bytes;
    }
    CRUMB_RETURN_IF_ERROR(session_->planes().ucx->SendPages(publish, begin, outgoing, deadline));
    return params;
  };
  bool daemon_may_read = false;  // Memory of its own.
  return WriteAll(publish, parts, num_slots, stage, deadline, &daemon_may_read);
}

absl::Status Publisher::WriteAll(PublishId publish,
                                 const std::vector<Part>& parts,
                                 size_t num_slots,
                                 StagePart stage,
                                 absl::Time deadline,
                                 bool* daemon_may_read) {
  if (parts.size() == 1) {
    CRUMB_ASSIGN_OR_RETURN(const CommitParams params, stage(parts.front(), 0));
    absl::Status status = Commit(params, deadline);
    *daemon_may_read = MeansNoAnswer(status);
    return status;
  }
  PartWrites::Options options = options_.writes;
  options.num_slots = num_slots;
  PartWrites writes(options, session_->control(), clock_, deadline);
  const absl::Status status = [&] {
    for (const Part& part : parts) {
      CRUMB_ASSIGN_OR_RETURN(const size_t slot, writes.AwaitSlot());
      CRUMB_ASSIGN_OR_RETURN(CommitParams params, stage(part, slot));
      writes.Start(slot, std::move(params));
    }
    return writes.AwaitAll();
  }();
  *daemon_may_read = writes.AwaitAnswers();
  return status.ok() ? Commit({.publish = publish, .staged = {}}, deadline) : status;
}

absl::StatusOr<std::vector<StagedImage>> Publisher::FillStaging(std::span<const PlannedPage> part,
                                                                std::span<std::byte> staging,
                                                                absl::Time deadline) {
  if (clock_.Now() >= deadline) {
    return absl::DeadlineExceededError(absl::StrCat(
        "publish: page ", part.front().page.value(), " and others of ", result_.bytes_sent,
        " bytes were not copied in time; give it longer, or "
        "publish less"));
  }
  std::vector<StagedImage> staged;
  staged.reserve(part.size());
  size_t offset = 0;
  for (const PlannedPage& page : part) {
    const std::span<std::byte> image = staging.subspan(offset, PageBytes(page.encoding));
    CRUMB_RETURN_IF_ERROR(pages_.ExportPage(page.page, page.encoding, image));
    staged.push_back(
        {.page = page.page, .encoding = page.encoding, .offset = offset, .head_crc32c = {}});
    offset += Align(image.size());
  }
  const uint32_t num_heads = session_->info().heads.count;
  CRUMB_ASSIGN_OR_RETURN(const std::vector<uint32_t> checksums, pages_.Finish(num_heads));
  auto next = checksums.begin();
  for (StagedImage& page : staged) {
    if (checksums.empty()) {
      page.head_crc32c =
          Checksums(staging.subspan(page.offset, PageBytes(page.encoding)), num_heads);
    } else {
      page.head_crc32c.assign(next, next + num_heads);
      next += num_heads;
    }
  }
  return staged;
}

absl::Status Publisher::Commit(const CommitParams& params, absl::Time deadline) {
  absl::StatusOr<CommitCounts> counts = session_->control().CommitPublish(params, deadline);
  absl::Duration backoff = options_.writes.first_backoff;
  // What was handed over stays with the daemon, so the commit alone is repeated.
  while (absl::IsResourceExhausted(counts.status()) && clock_.Now() + backoff < deadline) {
    // sleeps: the back-off itself; the daemon has no way to say that its queue has room.
    absl::SleepFor(backoff);
    backoff = std::min(2 * backoff, options_.writes.max_backoff);
    counts = session_->control().CommitPublish(params, deadline);
  }
  CRUMB_RETURN_IF_ERROR(counts.status());
  result_.pages_added = counts->pages_added;
  result_.pages_present = counts->pages_present;
  return absl::OkStatus();
}

}  // namespace crumb
