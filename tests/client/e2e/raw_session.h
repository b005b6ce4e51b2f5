// SPDX-License-Identifier: Apache-2.0
//
// A session by hand: it says what the library would not, and stops between two steps where the
// library would go on.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/notification.h"

#include "client/session/control_plane.h"
#include "client/transport/map_transport.h"
#include "client/transport/page_source.h"
#include "crumb/client.h"
#include "proto/base/bfloat16.h"
#include "proto/base/clock.h"
#include "proto/base/crc32c.h"
#include "proto/page/namespace_id.h"

namespace crumb {

// Of tenant "default", with all heads. Thread-compatible.
class RawSession {
 public:
  // Attached on return; aborts where that fails. UCX only where `plane` is kUcx.
  RawSession(const std::string& address,
             const std::shared_ptr<const Profile>& profile,
             DataPlane plane = DataPlane::kMap)
      : profile_(profile), control_(ControlPlane::Create(address)) {
    attached_ = *control_->Attach(
        {.client_name = "raw", .tenant = "default", .profile = profile, .heads = AllHeads()});
    if (plane == DataPlane::kUcx) {
      ucx_ = *ConnectUcx(attached_.info, Soon());
    } else {
      map_ = *MapTransport::Connect({}, attached_.info, Soon());
    }
  }

  static absl::Time Soon() { return Clock::System().Now() + absl::Seconds(20); }
  const SessionInfo& info() const { return attached_.info; }
  ControlPlane& control() { return *control_; }

  absl::StatusOr<FoundPrefix> Lookup(std::span<const uint32_t> tokens) {
    return control_->Lookup({.context_key = "", .tokens = tokens}, Soon());
  }
  uint32_t MatchedTokens(std::span<const uint32_t> tokens) {
    return Lookup(tokens)->matched_tokens;
  }
  // The bytes of what a lookup found; over UCX, asked for.
  absl::StatusOr<std::unique_ptr<PageSource>> Open(const FoundPrefix& found) {
    const LeasedPrefix prefix{.lease = found.lease,
                              .namespace_id = ComputeNamespaceId("default", profile_->id(), ""),
                              .pages = found.pages};
    return map_ != nullptr ? map_->Open(prefix, Soon()) : ucx_->Open(prefix, Soon());
  }

  // Begins a publish of `tokens` and hands all its pages over, as BF16 of `rows` elements each:
  // what is left to do is the commit.
  absl::StatusOr<CommitParams> Stage(std::span<const uint32_t> tokens,
                                     std::span<const BFloat16> rows) {
    auto missing = control_->BeginPublish("", tokens, Soon());
    if (!missing.ok()) {
      return missing.status();
    }
    CommitParams params{.publish = missing->publish, .staged = {}, .over_ucx = map_ == nullptr};
    const std::span<const std::byte> bytes = std::as_bytes(rows);
    for (uint32_t page = 0; page < tokens.size() / kPageTokens; ++page) {
      params.staged.push_back(ImageOf(page, bytes));
    }
    if (map_ == nullptr) {
      const absl::Status sent = SendOverUcx(params, bytes);
      return sent.ok() ? absl::StatusOr<CommitParams>(std::move(params)) : sent;
    }
    auto staging = map_->AcquireStaging(bytes.size(), Soon());
    if (!staging.ok()) {
      return staging.status();
    }
    std::copy(bytes.begin(), bytes.end(), staging->begin());
    return params;
  }
  // Has the daemon write what is staged but for the last page, in two parts at once, and leaves
  // that one for the commit.
  absl::Status WriteAllButOne(CommitParams* params) {
    const size_t last = params->staged.size() - 1;
    std::vector<CommitParams> parts(2, *params);
    parts[0].staged.resize(last / 2);
    parts[1].staged.assign(params->staged.begin() + static_cast<ptrdiff_t>(last / 2),
                           params->staged.begin() + static_cast<ptrdiff_t>(last));
    std::array<absl::Notification, 2> answered;
    std::array<absl::Status, 2> answers;
    for (size_t part = 0; part < 2; ++part) {
      control_->StartWrite(parts[part], Soon(), [&, part](const absl::Status& status) {
        answers[part] = status;
        answered[part].Notify();
      });
    }
    for (absl::Notification& answer : answered) {
      answer.WaitForNotification();
    }
    params->staged.erase(params->staged.begin(),
                         params->staged.begin() + static_cast<ptrdiff_t>(last));
    answers[0].Update(answers[1]);
    return answers[0];
  }
  absl::StatusOr<CommitCounts> Commit(const CommitParams& params) {
    return control_->CommitPublish(params, Soon());
  }
  // After the last commit of what Stage staged.
  void EndStaging() {
    if (map_ != nullptr) {
      map_->ReleaseStaging(/*discard=*/false);
    }
  }
  // All of it; the first checksum is off by `checksum_error`.
  absl::StatusOr<CommitCounts> Publish(std::span<const uint32_t> tokens,
                                       std::span<const BFloat16> rows,
                                       uint32_t checksum_error = 0) {
    auto params = Stage(tokens, rows);
    if (!params.ok()) {
      return params.status();
    }
    params->staged[0].head_crc32c[0] += checksum_error;
    auto counts = Commit(*params);
    if (!counts.ok()) {
      control_->AbortPublish(params->publish, Soon()).IgnoreError();
    }
    EndStaging();
    return counts;
  }

  // Elements of a page's image in BF16.
  size_t PageElements() const {
    return profile_->geometry().PageBytes(PageEncoding::kBf16) / sizeof(BFloat16);
  }

 private:
  HeadRange AllHeads() const { return {0, profile_->geometry().num_kv_heads}; }

  StagedImage ImageOf(uint32_t page, std::span<const std::byte> bytes) const {
    const Geometry& geometry = profile_->geometry();
    const size_t head_bytes = geometry.HeadRangeBytes(PageEncoding::kBf16);
    StagedImage image{.page = PageIdx(page),
                      .encoding = PageEncoding::kBf16,
                      .offset = page * geometry.PageBytes(PageEncoding::kBf16),
                      .head_crc32c = {}};
    for (uint32_t head = 0; head < geometry.num_kv_heads; ++head) {
      image.head_crc32c.push_back(
          Crc32c(bytes.subspan(image.offset + head * head_bytes, head_bytes)));
    }
    return image;
  }
  absl::Status SendOverUcx(const CommitParams& params, std::span<const std::byte> bytes) {
    const size_t page_bytes = profile_->geometry().PageBytes(PageEncoding::kBf16);
    std::vector<OutgoingPage> pages;
    for (const StagedImage& image : params.staged) {
      pages.push_back({image.page, image.encoding, bytes.subspan(image.offset, page_bytes)});
    }
    return ucx_->SendPages(params.publish, 0, pages, Soon());
  }

  std::shared_ptr<const Profile> profile_;
  std::unique_ptr<ControlPlane> control_;
  AttachedSession attached_;
  std::unique_ptr<MapTransport> map_;  // One of the two.
  std::unique_ptr<PageTransport> ucx_;
};

}  // namespace crumb
