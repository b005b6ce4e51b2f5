// SPDX-License-Identifier: Apache-2.0
#include "daemon/rpc/cache_service.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "grpcpp/impl/codegen/proto_utils.h"

#include "daemon/log/log.h"
#include "daemon/rpc/lookup_message.h"
#include "daemon/rpc/request.h"
#include "daemon/rpc/unary_call.h"
#include "proto/base/status_macros.h"

// shared: the header says by whom.

namespace crumb {
namespace {

void FillPageTable(const std::vector<PageRef>& pages, v1::PageTable& table) {
  const auto count = static_cast<int>(pages.size());
  table.mutable_int2_chunk()->Resize(count, 0);
  table.mutable_int2_block()->Resize(count, 0);
  table.mutable_int2_generation()->Resize(count, 0);
  for (int i = 0; i < count; ++i) {
    const PageRef& page = pages[static_cast<size_t>(i)];
    if (page.int2.has_value()) {
      table.set_int2_chunk(i, page.int2->chunk.value());
      table.set_int2_block(i, page.int2->block);
      table.set_int2_generation(i, page.int2->generation.value());
    }
    if (page.bf16.has_value()) {
      table.add_bf16_page(static_cast<uint32_t>(i));
      table.add_bf16_chunk(page.bf16->chunk.value());
      table.add_bf16_block(page.bf16->block);
      table.add_bf16_generation(page.bf16->generation.value());
    }
  }
}

// Beside a table that is filled.
void FillGpuPages(const std::vector<PageRef>& pages, v1::PageTable& table) {
  const auto count = static_cast<int>(pages.size());
  table.mutable_gpu_int2_chunk()->Resize(count, 0);
  table.mutable_gpu_int2_block()->Resize(count, 0);
  table.mutable_gpu_int2_generation()->Resize(count, 0);
  for (int i = 0; i < count; ++i) {
    const PageRef& page = pages[static_cast<size_t>(i)];
    if (page.int2_copy.has_value()) {
      table.set_gpu_int2_chunk(i, page.int2_copy->chunk.value());
      table.set_gpu_int2_block(i, page.int2_copy->block);
      table.set_gpu_int2_generation(i, page.int2_copy->generation.value());
    }
    if (page.bf16.has_value()) {
      const BlockRef copy = page.bf16_copy.value_or(BlockRef{});
      table.add_gpu_bf16_chunk(copy.chunk.value());
      table.add_gpu_bf16_block(copy.block);
      table.add_gpu_bf16_generation(copy.generation.value());
    }
  }
}

bool AnyOnGpu(const std::vector<PageRef>& pages) {
  return std::any_of(pages.begin(), pages.end(), [](const PageRef& page) {
    return page.int2_copy.has_value() || page.bf16_copy.has_value();
  });
}

// Of which publish a request is; the request itself is gone by the time of its answer's log line.
struct NamedPublish {
  SessionId session;
  PublishId publish;
};

template <typename Request>
NamedPublish Named(const Request& request) {
  return {SessionId(request.session().id()), PublishId(request.publish_id())};
}

void LogFailure(const NamedPublish& of, const absl::Status& status) {
  if (!status.ok()) {
    LogEvent(
        LogLevel::kWarning, "publish_failed",
        {{"session", of.session.value()}, {"publish", of.publish.value()}, {"status", status}});
  }
}

}  // namespace

absl::StatusOr<SessionId> CacheService::Authenticate(const v1::SessionKey& key) const {
  SessionSecret secret;
  if (key.secret().size() != secret.size()) {
    return absl::UnauthenticatedError(absl::StrCat(
        "session.secret has ", key.secret().size(), " bytes, not ", secret.size(),
        ": every request proves its session; send AttachReply.session as it was received"));
  }
  std::copy(key.secret().begin(), key.secret().end(), secret.begin());
  const SessionId session(key.id());
  CRUMB_RETURN_IF_ERROR(context_.session_table.Authenticate(session, secret));
  return session;
}

uint32_t CacheService::lease_ms() const {
  return static_cast<uint32_t>(absl::ToInt64Milliseconds(context_.store.options().lease));
}

grpc::ServerBidiReactor<v1::AttachRequest, v1::AttachReply>* CacheService::Attach(
    grpc::CallbackServerContext* /*call*/) {
  return new AttachStream(context_, streams_);  // Deletes itself when the stream is done.
}

grpc::ServerUnaryReactor* CacheService::Lookup(grpc::CallbackServerContext* call,
                                               const grpc::ByteBuffer* request,
                                               grpc::ByteBuffer* reply) {
  return UnaryCall(context_, call, RpcMethod::kLookup).Finish(DoLookup(*request, *reply));
}

absl::Status CacheService::DoLookup(const grpc::ByteBuffer& request_bytes,
                                    grpc::ByteBuffer& reply_bytes) {
  CRUMB_ASSIGN_OR_RETURN(const LookupMessage message, DecodeLookup(request_bytes));
  const v1::LookupRequest& request = message.rest;
  CRUMB_ASSIGN_OR_RETURN(const SessionId session, Authenticate(request.session()));
  CRUMB_RETURN_IF_ERROR(CheckContextKey(request.context_key()));
  CRUMB_RETURN_IF_ERROR(message.tokens.status());
  CRUMB_ASSIGN_OR_RETURN(const LookupResult result,
                         context_.store.Lookup(session, request.context_key(),
                                               message.tokens->ids(), request.allow_int2_window()));
  v1::LookupReply reply;
  reply.set_matched_tokens(result.length.matched_tokens);
  reply.set_usable_tokens(result.length.usable_tokens);
  reply.set_trimmed_tokens(result.length.trimmed_tokens);
  reply.set_lease_id(result.lease.value());
  reply.set_lease_ms(lease_ms());
  FillPageTable(result.pages, *reply.mutable_pages());
  if (AnyOnGpu(result.pages)) {
    FillGpuPages(result.pages, *reply.mutable_pages());
  }
  bool is_own_buffer = false;
  const grpc::Status encoded =
      grpc::SerializationTraits<v1::LookupReply>::Serialize(reply, &reply_bytes, &is_own_buffer);
  return encoded.ok() ? absl::OkStatus()
                      : absl::InternalError("a LookupReply could not be encoded");
}

grpc::ServerUnaryReactor* CacheService::Probe(grpc::CallbackServerContext* call,
                                              const v1::ProbeRequest* request,
                                              v1::ProbeReply* reply) {
  return UnaryCall(context_, call, RpcMethod::kProbe).Finish(DoProbe(*request, *reply));
}

absl::Status CacheService::DoProbe(const v1::ProbeRequest& request, v1::ProbeReply& reply) {
  CRUMB_RETURN_IF_ERROR(CheckContextKey(request.context_key()));
  CRUMB_ASSIGN_OR_RETURN(const TokenList tokens, TokenList::Parse(request.tokens()));
  absl::StatusOr<PrefixLength> length;
  if (request.namespace_id().empty()) {
    CRUMB_ASSIGN_OR_RETURN(const SessionId session, Authenticate(request.session()));
    length = context_.store.Probe(session, request.context_key(), tokens.ids());
  } else if (request.has_session()) {
    return absl::InvalidArgumentError(
        "session and namespace_id are both set: a probe is of a session's prefixes or, for "
        "operators, of a namespace's");
  } else {
    CRUMB_ASSIGN_OR_RETURN(const NamespaceId namespace_id,
                           ParseNamespaceId(request.namespace_id()));
    length = context_.store.Probe(namespace_id, tokens.ids());
  }
  CRUMB_RETURN_IF_ERROR(length.status());
  reply.set_matched_tokens(length->matched_tokens);
  reply.set_usable_tokens(length->usable_tokens);
  reply.set_trimmed_tokens(length->trimmed_tokens);
  return absl::OkStatus();
}

grpc::ServerUnaryReactor* CacheService::BeginPublish(grpc::CallbackServerContext* call,
                                                     const v1::BeginPublishRequest* request,
                                                     v1::BeginPublishReply* reply) {
  return UnaryCall(context_, call, RpcMethod::kBeginPublish)
      .Finish(DoBeginPublish(*request, *reply));
}

absl::Status CacheService::DoBeginPublish(const v1::BeginPublishRequest& request,
                                          v1::BeginPublishReply& reply) {
  CRUMB_ASSIGN_OR_RETURN(const SessionId session, Authenticate(request.session()));
  CRUMB_RETURN_IF_ERROR(CheckContextKey(request.context_key()));
  CRUMB_ASSIGN_OR_RETURN(const TokenList tokens, TokenList::Parse(request.tokens()));
  if (tokens.ids().size() % kPageTokens != 0) {
    return absl::InvalidArgumentError(absl::StrCat("tokens has ", tokens.ids().size(),
                                                   " ids, not a multiple of ", kPageTokens,
                                                   ": publish whole pages only"));
  }
  CRUMB_ASSIGN_OR_RETURN(const PublishPlan plan,
                         context_.store.BeginPublish(session, request.context_key(), tokens.ids()));
  reply.set_publish_id(plan.id.value());
  for (const PageKey& key : plan.missing) {
    if (key.encoding == PageEncoding::kInt2) {
      reply.add_int2_missing(key.page.value());
    } else {
      reply.add_bf16_missing(key.page.value());
    }
  }
  return absl::OkStatus();
}

grpc::ServerUnaryReactor* CacheService::WritePages(grpc::CallbackServerContext* call,
                                                   const v1::WritePagesRequest* request,
                                                   v1::WritePagesReply* /*reply*/) {
  const UnaryCall unary(context_, call, RpcMethod::kWritePages);
  const auto done = [unary, of = Named(*request)](const absl::StatusOr<CommitResult>& result) {
    LogFailure(of, result.status());
    unary.Finish(result.status());
  };
  absl::Status status =
      request->staged().empty()
          ? absl::InvalidArgumentError("staged is empty: list the pages to write, or commit")
          : StartWriting(*request, /*commits=*/false, done);
  return status.ok() ? unary.reactor() : unary.Finish(status);
}

grpc::ServerUnaryReactor* CacheService::CommitPublish(grpc::CallbackServerContext* call,
                                                      const v1::CommitPublishRequest* request,
                                                      v1::CommitPublishReply* reply) {
  const UnaryCall unary(context_, call, RpcMethod::kCommitPublish);
  const auto done = [this, unary, reply,
                     of = Named(*request)](const absl::StatusOr<CommitResult>& result) {
    LogFailure(of, result.status());
    if (result.ok()) {
      DropStaging(of.session, of.publish);  // Not before: who was refused repeats just the commit.
      reply->set_pages_added(result->pages_added);
      reply->set_pages_present(result->pages_present);
    }
    unary.Finish(result.status());
  };
  absl::Status status = StartWriting(*request, /*commits=*/true, done);
  return status.ok() ? unary.reactor() : unary.Finish(status);
}

template <typename Request>
absl::Status CacheService::StartWriting(const Request& request,
                                        bool commits,
                                        const PublishJob::Done& done) {
  const PublishId publish(request.publish_id());
  CRUMB_ASSIGN_OR_RETURN(const SessionId id, Authenticate(request.session()));
  CRUMB_ASSIGN_OR_RETURN(auto session, context_.sessions.Find(id));
  CRUMB_ASSIGN_OR_RETURN(std::vector<StagedPage> staged, ParseStaged(request.staged()));
  if (staged.empty()) {
    // All was there already, or is written: no bytes to touch.
    done(context_.store.CommitPublish(session->id, publish, {}));
    return absl::OkStatus();
  }
  CRUMB_ASSIGN_OR_RETURN(auto memory, FindStaging(request.staging(), id, publish));
  CRUMB_ASSIGN_OR_RETURN(
      std::unique_ptr<PublishJob> job,
      PublishJob::Create(
          context_, {std::move(session), publish, std::move(staged), std::move(memory), commits},
          done));
  return context_.pool.Submit(std::move(job));
}

// shared: see StagingMemory.
absl::StatusOr<std::shared_ptr<const StagingMemory>> CacheService::FindStaging(v1::Staging staging,
                                                                               SessionId session,
                                                                               PublishId publish) {
  switch (staging) {
    case v1::STAGING_MEMFD:
      return context_.session_table.Staging(session);
    case v1::STAGING_UCX:
      if (context_.ucx == nullptr) {
        return absl::FailedPreconditionError(
            "staging is STAGING_UCX, but this daemon does not offer UCX ([ucx] enabled): stage in "
            "a memfd");
      }
      return context_.ucx->Staging(session, publish);
    default:
      return absl::InvalidArgumentError(
          absl::StrCat("staging is ", static_cast<int>(staging),
                       ": it must be STAGING_MEMFD (0) or STAGING_UCX (1)"));
  }
}

void CacheService::DropStaging(SessionId session, PublishId publish) {
  if (context_.ucx != nullptr) {
    context_.ucx->DropStaging(session, publish);
  }
}

grpc::ServerUnaryReactor* CacheService::AbortPublish(grpc::CallbackServerContext* call,
                                                     const v1::AbortPublishRequest* request,
                                                     v1::AbortPublishReply* /*reply*/) {
  return UnaryCall(context_, call, RpcMethod::kAbortPublish).Finish(DoAbortPublish(*request));
}

absl::Status CacheService::DoAbortPublish(const v1::AbortPublishRequest& request) {
  CRUMB_ASSIGN_OR_RETURN(const SessionId session, Authenticate(request.session()));
  const PublishId publish(request.publish_id());
  DropStaging(session, publish);
  return context_.store.AbortPublish(session, publish);
}

grpc::ServerUnaryReactor* CacheService::RenewLeases(grpc::CallbackServerContext* call,
                                                    const v1::RenewLeasesRequest* request,
                                                    v1::RenewLeasesReply* reply) {
  return UnaryCall(context_, call, RpcMethod::kRenewLeases).Finish(DoRenewLeases(*request, *reply));
}

absl::Status CacheService::DoRenewLeases(const v1::RenewLeasesRequest& request,
                                         v1::RenewLeasesReply& reply) {
  CRUMB_ASSIGN_OR_RETURN(const SessionId session, Authenticate(request.session()));
  CRUMB_ASSIGN_OR_RETURN(const std::vector<LeaseId> leases, ParseLeases(request.lease_ids()));
  CRUMB_ASSIGN_OR_RETURN(const std::vector<LeaseId> ended,
                         context_.store.RenewLeases(session, leases));
  reply.set_lease_ms(lease_ms());
  for (const LeaseId lease : ended) {
    reply.add_ended_lease_ids(lease.value());
  }
  return absl::OkStatus();
}

grpc::ServerUnaryReactor* CacheService::ReleaseLeases(grpc::CallbackServerContext* call,
                                                      const v1::ReleaseLeasesRequest* request,
                                                      v1::ReleaseLeasesReply* /*reply*/) {
  return UnaryCall(context_, call, RpcMethod::kReleaseLeases).Finish(DoReleaseLeases(*request));
}

absl::Status CacheService::DoReleaseLeases(const v1::ReleaseLeasesRequest& request) {
  CRUMB_ASSIGN_OR_RETURN(const SessionId session, Authenticate(request.session()));
  CRUMB_ASSIGN_OR_RETURN(const std::vector<LeaseId> leases, ParseLeases(request.lease_ids()));
  return context_.store.ReleaseLeases(session, leases);
}

}  // namespace crumb
