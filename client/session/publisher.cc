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

// Of one call to the UCX transport, which waits for the daemon's answer once a call: about what the
// transport keeps under way, so that little is copied twice and waiting is rare.
constexpr size_t kMaxSendBytes = size_t{8} << 20;

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

size_t Publisher::PageBytes(PageEncoding encoding) const {
  return session_->info().heads.count *
         session_->info().profile->geometry().HeadRangeBytes(encoding);
}

size_t Publisher::TotalBytes(std::span<const PlannedPage> plan) const {
  size_t total = 0;
  for (const PlannedPage& page : plan) {
    total += Align(PageBytes(page.encoding));
  }
  return total;
}

size_t Publisher::CountFitting(std::span<const PlannedPage> plan, size_t max_bytes) const {
  size_t bytes = 0;
  size_t count = 0;
  for (const PlannedPage& page : plan) {
    bytes += Align(PageBytes(page.encoding));
    if (bytes > max_bytes && count > 0) {
      break;
    }
    ++count;
  }
  return count;
}

std::vector<size_t> Publisher::Cuts(std::span<const PlannedPage> plan) const {
  std::vector<size_t> cuts;
  for (size_t count = CountFitting(plan, options_.max_step_bytes); count < plan.size();
       count = CountFitting(plan, options_.max_step_bytes)) {
    cuts.push_back((size_t{plan[count - 1].page.value()} + 1) * kPageTokens);
    plan = plan.subspan(count);
  }
  return cuts;
}

absl::StatusOr<PublishResult> Publisher::Run(const std::string& context_key,
                                             std::span<const uint32_t> tokens,
                                             absl::Time deadline) {
  std::vector<size_t> ends = {tokens.size()};  // Of what is to be published; the next is the last.
  while (!ends.empty()) {
    CRUMB_ASSIGN_OR_RETURN(const std::vector<size_t> cuts,
                           Step(context_key, tokens.first(ends.back()), deadline));
    if (cuts.empty()) {
      ends.pop_back();
    } else {
      ends.insert(ends.end(), cuts.rbegin(), cuts.rend());
    }
  }
  return result_;
}

absl::StatusOr<std::vector<size_t>> Publisher::Step(const std::string& context_key,
                                                    std::span<const uint32_t> tokens,
                                                    absl::Time deadline) {
  ControlPlane& control = session_->control();
  CRUMB_ASSIGN_OR_RETURN(const MissingPages missing,
                         control.BeginPublish(context_key, tokens, deadline));
  absl::Cleanup abort = [&] {
    // At the session's end the daemon drops it anyway, so this may fail.
    control.AbortPublish(missing.publish, clock_.Now() + absl::Seconds(1)).IgnoreError();
  };
  CRUMB_ASSIGN_OR_RETURN(const std::vector<PlannedPage> plan,
                         PlanPublish(missing, pages_, session_->info().profile->windows()));
  if (std::vector<size_t> cuts = Cuts(plan); !cuts.empty()) {
    return cuts;
  }
  CRUMB_RETURN_IF_ERROR(HandOver(missing.publish, plan, deadline));
  std::move(abort).Cancel();
  return std::vector<size_t>();
}

absl::Status Publisher::HandOver(PublishId publish,
                                 const std::vector<PlannedPage>& plan,
                                 absl::Time deadline) {
  CRUMB_RETURN_IF_ERROR(session_->planes().map != nullptr
                            ? CommitFromStaging(publish, plan, deadline)
                            : CommitOverUcx(publish, plan, deadline));
  for (const PlannedPage& page : plan) {
    result_.tail_pages += page.is_tail ? 1 : 0;
    result_.bytes_sent += PageBytes(page.encoding);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<StagedImage>> Publisher::FillStaging(std::span<const PlannedPage> plan,
                                                                std::span<std::byte> staging,
                                                                absl::Time deadline) {
  std::vector<StagedImage> staged;
  staged.reserve(plan.size());
  size_t offset = 0;
  for (const PlannedPage& page : plan) {
    const std::span<std::byte> image = staging.subspan(offset, PageBytes(page.encoding));
    CRUMB_RETURN_IF_ERROR(pages_.ExportPage(page.page, page.encoding, image));
    staged.push_back(
        {.page = page.page, .encoding = page.encoding, .offset = offset, .head_crc32c = {}});
    offset += Align(image.size());
    if (clock_.Now() >= deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat("publish: ", staged.size(), " of ", plan.size(),
                       " pages were copied in time; give it longer, or publish less"));
    }
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

absl::Status Publisher::CommitFromStaging(PublishId publish,
                                          const std::vector<PlannedPage>& plan,
                                          absl::Time deadline) {
  CommitParams params{.publish = publish, .staged = {}};
  if (plan.empty()) {
    return Commit(params, deadline);
  }
  MapTransport& map = *session_->planes().map;
  CRUMB_ASSIGN_OR_RETURN(const std::span<std::byte> staging,
                         map.AcquireStaging(TotalBytes(plan), deadline));
  if (pages_.wants_registered_memory()) {
    map.RegisterStaging().IgnoreError();  // Copies work without, too, if slower.
  }
  bool daemon_may_read = false;
  absl::Cleanup release = [&] { map.ReleaseStaging(/*discard=*/daemon_may_read); };
  CRUMB_ASSIGN_OR_RETURN(params.staged, FillStaging(plan, staging, deadline));
  absl::Status status = Commit(params, deadline);
  // An answer means that the daemon is done with it; no answer means nothing.
  daemon_may_read = status.code() == absl::StatusCode::kDeadlineExceeded ||
                    status.code() == absl::StatusCode::kUnavailable ||
                    status.code() == absl::StatusCode::kCancelled;
  return status;
}

absl::Status Publisher::CommitOverUcx(PublishId publish,
                                      const std::vector<PlannedPage>& plan,
                                      absl::Time deadline) {
  CommitParams params{.publish = publish, .staged = {}, .over_ucx = true};
  std::vector<std::byte> buffer;
  for (std::span<const PlannedPage> rest = plan; !rest.empty();) {
    const size_t count = CountFitting(rest, kMaxSendBytes);
    CRUMB_RETURN_IF_ERROR(SendOverUcx(rest.first(count), deadline, buffer, params));
    rest = rest.subspan(count);
  }
  return Commit(params, deadline);
}

absl::Status Publisher::SendOverUcx(std::span<const PlannedPage> pages,
                                    absl::Time deadline,
                                    std::vector<std::byte>& buffer,
                                    CommitParams& params) {
  buffer.resize(std::max(buffer.size(), TotalBytes(pages)));
  CRUMB_ASSIGN_OR_RETURN(std::vector<StagedImage> staged, FillStaging(pages, buffer, deadline));
  std::vector<OutgoingPage> outgoing;
  for (StagedImage& page : staged) {
    outgoing.push_back({.page = page.page,
                        .encoding = page.encoding,
                        .image = std::span(buffer).subspan(page.offset, PageBytes(page.encoding))});
    // The daemon puts pages back to back, in the order of sending.
    page.offset = params.staged.empty()
                      ? 0
                      : params.staged.back().offset + PageBytes(params.staged.back().encoding);
    params.staged.push_back(std::move(page));
  }
  return session_->planes().ucx->SendPages(params.publish, outgoing, deadline);
}

absl::Status Publisher::Commit(const CommitParams& params, absl::Time deadline) {
  absl::StatusOr<CommitCounts> counts = session_->control().CommitPublish(params, deadline);
  absl::Duration backoff = options_.first_backoff;
  // What was handed over stays with the daemon, so the commit alone is repeated.
  while (absl::IsResourceExhausted(counts.status()) && clock_.Now() + backoff < deadline) {
    // sleeps: the back-off itself; the daemon has no way to say that its queue has room.
    absl::SleepFor(backoff);
    backoff = std::min(2 * backoff, options_.max_backoff);
    counts = session_->control().CommitPublish(params, deadline);
  }
  CRUMB_RETURN_IF_ERROR(counts.status());
  result_.pages_added += counts->pages_added;
  // The last step counts what the steps before it added as present.
  result_.pages_present = counts->pages_present;
  return absl::OkStatus();
}

}  // namespace crumb
