// SPDX-License-Identifier: Apache-2.0
#include "client/session/client_impl.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "client/session/prefix.h"
#include "client/session/publisher.h"
#include "proto/base/service_address.h"
#include "proto/base/status_macros.h"
#include "proto/base/utf8.h"
#include "proto/page/check_heads.h"
#include "proto/page/namespace_id.h"

namespace crumb {
namespace {

constexpr size_t kMaxTokens = size_t{1} << 20;  // LookupRequest.tokens.

absl::Status CheckPrompt(std::span<const uint32_t> tokens, const std::string& context_key) {
  if (tokens.size() > kMaxTokens) {
    return absl::InvalidArgumentError(absl::StrCat("a prompt of ", tokens.size(),
                                                   " tokens; at most ", kMaxTokens,
                                                   ": look up, or publish, its first part"));
  }
  // The daemon could not say so: it has no message that it can read.
  return IsUtf8(context_key) ? absl::OkStatus()
                             : absl::InvalidArgumentError(
                                   "context_key is not UTF-8: write bytes as hexadecimal digits");
}

// The daemon may have ended a session whose end has not arrived here yet, for example because this
// process was stopped. To the engine that is as if it were not attached.
absl::Status WhileAttaching(const absl::Status& status) {
  if (status.code() != absl::StatusCode::kFailedPrecondition) {
    return status;
  }
  return absl::UnavailableError(absl::StrCat("attaching anew, since ", status.message()));
}

// A pull costs by the byte. Where a page's BF16 rows are wanted, its INT2 rows can be made of them.
std::vector<PagePlaces> PlacesToPull(std::vector<PagePlaces> pages) {
  for (PagePlaces& page : pages) {
    if (page.bf16.present()) {
      page.int2 = {};
    }
  }
  return pages;
}

}  // namespace

ClientImpl::ClientImpl(const ClientOptions& options, const GpuUuid& gpu_uuid, const Clock& clock)
    : options_(options), clock_(clock), keeper_(options, gpu_uuid, clock) {}

absl::StatusOr<std::shared_ptr<PrefixHandle>> ClientImpl::Lookup(std::span<const uint32_t> tokens,
                                                                 const LookupOptions& options) {
  CRUMB_RETURN_IF_ERROR(CheckPrompt(tokens, options.context_key));
  // shared: see session_keeper.h.
  CRUMB_ASSIGN_OR_RETURN(std::shared_ptr<Session> session, keeper_.Current());
  if (tokens.empty()) {
    return std::make_shared<Prefix>(std::move(session), FoundPrefix{}, nullptr);
  }
  const absl::Time sent_at = clock_.Now();
  const auto found = session->control().Lookup({.context_key = options.context_key,
                                                .tokens = tokens,
                                                .allow_int2_window = options.allow_int2_window},
                                               sent_at + options.timeout);
  if (!found.ok()) {
    return WhileAttaching(found.status());
  }
  if (found->lease == LeaseId()) {
    return std::make_shared<Prefix>(std::move(session), *found, nullptr);
  }
  session->AddLease(found->lease, sent_at + found->lease_for);
  auto source = OpenSource(*session, *found, options, sent_at);
  if (!source.ok()) {
    session->ReleaseLease(found->lease);
    return source.status();
  }
  return std::make_shared<Prefix>(std::move(session), *found, *std::move(source), options_.gpu);
}

absl::StatusOr<std::unique_ptr<PageSource>> ClientImpl::OpenSource(const Session& session,
                                                                   const FoundPrefix& found,
                                                                   const LookupOptions& options,
                                                                   absl::Time sent_at) {
  const bool pull = session.planes().map == nullptr;
  const LeasedPrefix prefix{.lease = found.lease,
                            .namespace_id = ComputeNamespaceId(
                                options_.tenant, session.info().profile->id(), options.context_key),
                            .pages = pull ? PlacesToPull(found.pages) : found.pages};
  if (options.on_gpu && !pull) {
    return session.planes().map->OpenOnGpu(prefix, sent_at + options.timeout);
  }
  return session.planes().transport()->Open(
      prefix, sent_at + (pull ? options.pull_timeout : options.timeout));
}

absl::Status ClientImpl::CheckRows(const ProfileId& profile_id, const HeadRange& heads) const {
  if (profile_id == options_.profile->id() && heads == options_.heads) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "the sequence is of profile ", profile_id.Short(), " and KV heads ", heads.first, " + ",
      heads.count, ", the client of profile ", options_.profile->id().Short(), " and KV heads ",
      options_.heads.first, " + ", options_.heads.count, "; make both with the same"));
}

absl::StatusOr<PublishResult> ClientImpl::Publish(const Sequence& sequence,
                                                  std::span<const uint32_t> tokens,
                                                  const PublishOptions& options) {
  CRUMB_RETURN_IF_ERROR(CheckRows(sequence.profile().id(), sequence.heads()));
  SequenceExporter exporter(sequence);
  return PublishPages(exporter, tokens, options);
}

absl::StatusOr<PublishResult> ClientImpl::PublishFromGpu(const GpuPages& pages,
                                                         std::span<const uint32_t> tokens,
                                                         const PublishOptions& options) {
  if (options_.gpu < 0) {
    return absl::FailedPreconditionError(
        "ClientOptions::gpu is -1; name the GPU in whose memory the pages are");
  }
  if (const ProfileId* profile_id = pages.profile_id(); profile_id != nullptr) {
    CRUMB_RETURN_IF_ERROR(CheckRows(*profile_id, pages.heads()));
  }
  const ScopedGpu current(options_.gpu);
  CRUMB_RETURN_IF_ERROR(current.status());
  CRUMB_ASSIGN_OR_RETURN(const std::unique_ptr<GpuExporter> exporter, GpuExporter::Create(pages));
  return PublishPages(*exporter, tokens, options);
}

absl::StatusOr<PublishResult> ClientImpl::PublishPages(PageExporter& exporter,
                                                       std::span<const uint32_t> tokens,
                                                       const PublishOptions& options) {
  CRUMB_RETURN_IF_ERROR(CheckPrompt(tokens, options.context_key));
  if (tokens.empty() || tokens.size() % kPageTokens != 0 || tokens.size() > exporter.length()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "publish of ", tokens.size(), " tokens; it must be a multiple of ", kPageTokens,
        ", at least one page, and within the sequence's ", exporter.length(), " tokens"));
  }
  const absl::Time deadline = clock_.Now() + options.timeout;
  CRUMB_ASSIGN_OR_RETURN(const std::shared_ptr<Session> session, keeper_.Current());
  return Publisher({}, session, exporter, clock_).Run(options.context_key, tokens, deadline);
}

absl::StatusOr<std::unique_ptr<Client>> Client::Create(ClientOptions options) {
  const auto refuse = [](const char* option, const std::string& problem) {
    return absl::InvalidArgumentError(absl::StrCat("ClientOptions::", option, " ", problem));
  };
  if (options.profile == nullptr) {
    return refuse("profile", "is null; load the model's profile first");
  }
  if (const absl::Status address = CheckServiceAddress(options.address); !address.ok()) {
    return refuse("address", absl::StrCat("is wrong: ", address.message()));
  }
  if (options.client_name.empty() || options.client_name.size() > 128 ||
      !IsUtf8(options.client_name)) {
    return refuse("client_name", absl::StrCat("has ", options.client_name.size(),
                                              " bytes; it must have 1 to 128, in UTF-8"));
  }
  const uint32_t model_heads = options.profile->geometry().num_kv_heads;
  options.heads = options.heads.Resolve(model_heads);
  CRUMB_RETURN_IF_ERROR(CheckHeads("ClientOptions::heads", options.heads, model_heads));
  if (options.tenant.empty()) {
    options.tenant = "default";
  }
  if (options.reconnect_backoff_max <= absl::ZeroDuration()) {
    return refuse("reconnect_backoff_max", "must be positive");
  }
  GpuUuid gpu_uuid{};
  if (options.gpu >= 0) {
    const auto uuid = GetGpuUuid(options.gpu);
    if (!uuid.ok()) {
      return absl::Status(uuid.status().code(), absl::StrCat("ClientOptions::gpu is ", options.gpu,
                                                             ": ", uuid.status().message()));
    }
    gpu_uuid = *uuid;
  }
  return std::make_unique<ClientImpl>(options, gpu_uuid, Clock::System());
}

}  // namespace crumb
