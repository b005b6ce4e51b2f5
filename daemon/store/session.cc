// SPDX-License-Identifier: Apache-2.0
//
// StoreCore: sessions and namespaces, and what is asked of their names.
#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

#include "daemon/store/store_core.h"
#include "proto/base/check.h"
#include "proto/base/status_macros.h"
#include "proto/page/namespace_id.h"

namespace crumb::store_internal {
namespace {

constexpr size_t kMaxNameBytes = 128;
constexpr size_t kMaxContextKeyBytes = 256;

absl::Status CheckName(absl::string_view field, absl::string_view name) {
  if (name.empty() || name.size() > kMaxNameBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(field, " has ", name.size(), " bytes; 1 to ", kMaxNameBytes, " are allowed"));
  }
  return absl::OkStatus();
}

absl::Status CheckTenant(absl::string_view tenant) {
  CRUMB_RETURN_IF_ERROR(CheckName("tenant", tenant));
  const auto allowed = [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '.' || c == '-';
  };
  const auto wrong = std::find_if_not(tenant.begin(), tenant.end(), allowed);
  if (wrong != tenant.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat("tenant has the byte 0x", absl::Hex(static_cast<unsigned char>(*wrong)),
                     " at position ", wrong - tenant.begin(), "; use A-Z a-z 0-9 _ . -"));
  }
  return absl::OkStatus();
}

absl::Status CheckProfile(const PageProfile& profile) {
  const Geometry& g = profile.geometry;
  if (!g.IsValid()) {
    return absl::InvalidArgumentError(
        absl::StrCat("profile ", profile.id.Short(), ": geometry of ", g.num_layers, " layers, ",
                     g.num_kv_heads, " KV heads, head_dim ", g.key_dim, " and ", g.value_dim,
                     "; at most ", Geometry::kMaxLayers, " layers, ", Geometry::kMaxKvHeads,
                     " heads, head_dim a multiple of 32 up to ", kMaxHeadDim));
  }
  const Windows& w = profile.windows;
  if (w.sink_tokens % kPageTokens != 0 || w.recent_tokens % kPageTokens != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "profile ", profile.id.Short(), ": sink_tokens ", w.sink_tokens, " and recent_tokens ",
        w.recent_tokens, " must be multiples of ", kPageTokens));
  }
  return absl::OkStatus();
}

}  // namespace

StoreCore::StoreCore(const StoreOptions& options, const CopyTier* tier)
    : options_(options), blocks_(options.capacity_bytes, options.chunk_bytes), copies_(tier) {
  if (tier != nullptr) {
    blocks_.TellNewChunks();
  }
}

StoreCore::~StoreCore() {
  CRUMB_CHECK(reads_ + writes_ + copying_ == 0, "a guard outlives its store");
}

std::vector<std::unique_ptr<Chunk>> StoreCore::TakeClosedChunks() {
  std::vector<std::unique_ptr<Chunk>> closed = blocks_.TakeClosed();
  for (std::unique_ptr<Chunk>& chunk : copies_.TakeClosed()) {
    closed.push_back(std::move(chunk));
  }
  return closed;
}

int64_t StoreCore::NextStamp(absl::Time now) {
  last_stamp_ = std::max(last_stamp_ + 1, absl::ToUnixNanos(now));
  return last_stamp_;
}

absl::StatusOr<SessionId> StoreCore::OpenSession(const SessionSpec& spec, absl::Time now) {
  CRUMB_RETURN_IF_ERROR(CheckNotDraining("new sessions"));
  CRUMB_RETURN_IF_ERROR(CheckName("client_name", spec.client_name));
  CRUMB_RETURN_IF_ERROR(CheckTenant(spec.tenant));
  CRUMB_RETURN_IF_ERROR(CheckProfile(spec.profile));
  const uint32_t num_heads = spec.profile.geometry.num_kv_heads;
  if (!spec.heads.Resolve(num_heads).IsWithin(num_heads)) {
    return absl::InvalidArgumentError(absl::StrCat("heads: first ", spec.heads.first, ", count ",
                                                   spec.heads.count, "; the profile has ",
                                                   num_heads, " KV heads"));
  }
  if (sessions_.size() >= options_.max_sessions) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "no more sessions: ", sessions_.size(), " are attached, of at most ", options_.max_sessions,
        "; detach engines that are done, or raise [store] max_sessions"));
  }
  auto session = std::make_unique<Session>();
  session->id = SessionId(++last_id_);
  session->spec = spec;
  session->spec.heads = spec.heads.Resolve(num_heads);
  session->since = now;
  const SessionId id = session->id;
  sessions_.emplace(id, std::move(session));
  return id;
}

void StoreCore::EndSession(SessionId id, absl::Time now) {
  const auto place = sessions_.find(id);
  if (place == sessions_.end()) {
    return;
  }
  Session& session = *place->second;
  // Copies: ending them takes them out of these sets.
  const std::vector<PublishId> publishes(session.publishes.begin(), session.publishes.end());
  for (const PublishId publish : publishes) {
    ++counters_.publishes_aborted;
    EndPublish(publishes_.at(publish).get());
  }
  const std::vector<LeaseId> leases(session.leases.begin(), session.leases.end());
  for (const LeaseId lease : leases) {
    Quarantine(leases_.at(lease).get(), now);
  }
  sessions_.erase(id);
}

absl::StatusOr<ChunkFd> StoreCore::GetChunk(SessionId session_id, ChunkId chunk_id) const {
  CRUMB_ASSIGN_OR_RETURN(const Session* const session, FindSession(session_id));
  const Chunk* const chunk = blocks_.arena().Find(chunk_id);
  if (chunk == nullptr) {
    return absl::NotFoundError(absl::StrCat("chunk ", chunk_id.value(),
                                            " is not there (any more); look the prefix up again"));
  }
  CRUMB_RETURN_IF_ERROR(CheckMayMap(*session, *chunk));
  CRUMB_ASSIGN_OR_RETURN(UniqueFd fd, chunk->Duplicate());
  return ChunkFd{std::move(fd), chunk->bytes(), chunk->num_blocks()};
}

absl::StatusOr<std::vector<ChunkName>> StoreCore::ListChunks(SessionId session_id,
                                                             bool of_copies,
                                                             ChunkId below,
                                                             size_t max) const {
  CRUMB_ASSIGN_OR_RETURN(const Session* const session, FindSession(session_id));
  std::vector<ChunkName> chunks;
  const auto add = [&](const Chunk& chunk) {
    if ((below == ChunkId() || chunk.id() < below) && CheckMayMap(*session, chunk).ok()) {
      chunks.push_back({chunk.id(), chunk.spec().encoding});
    }
  };
  if (of_copies) {
    copies_.VisitChunks(add);
  } else {
    blocks_.arena().VisitChunks(add);
  }
  std::sort(chunks.begin(), chunks.end(),
            [](const ChunkName& a, const ChunkName& b) { return b.id < a.id; });
  chunks.resize(std::min(chunks.size(), max));
  return chunks;
}

absl::Status StoreCore::CheckMayMap(const Session& session, const Chunk& chunk) const {
  const Namespace& ns = *namespaces_.at(chunk.spec().namespace_id);
  if (ns.tenant != session.spec.tenant || ns.profile.id != session.spec.profile.id) {
    return absl::PermissionDeniedError(
        absl::StrCat("chunk ", chunk.id().value(), " is not of tenant ", session.spec.tenant,
                     " under profile ", session.spec.profile.id.Short()));
  }
  return absl::OkStatus();
}

absl::StatusOr<const Session*> StoreCore::FindSession(SessionId id) const {
  const auto place = sessions_.find(id);
  if (place == sessions_.end()) {
    return absl::FailedPreconditionError(
        absl::StrCat("session ", id.value(),
                     " is not attached: its stream ended, or it was never there; attach "
                     "again"));
  }
  return place->second.get();
}

absl::StatusOr<Session*> StoreCore::FindSession(SessionId id) {
  CRUMB_ASSIGN_OR_RETURN(const Session* const session, std::as_const(*this).FindSession(id));
  return const_cast<Session*>(session);
}

absl::Status StoreCore::CheckNotDraining(std::string_view what) const {
  return draining_
             ? absl::UnavailableError(absl::StrCat("the daemon is draining and takes no ",
                                                   absl::string_view(what.data(), what.size()),
                                                   "; attach again when it is back"))
             : absl::OkStatus();
}

absl::Status StoreCore::CheckPrompt(std::string_view context_key,
                                    std::span<const uint32_t> tokens) const {
  if (tokens.empty() || tokens.size() > options_.max_tokens) {
    return absl::InvalidArgumentError(absl::StrCat("tokens has ", tokens.size(), " tokens; 1 to ",
                                                   options_.max_tokens, " are allowed"));
  }
  if (context_key.size() > kMaxContextKeyBytes) {
    return absl::InvalidArgumentError(absl::StrCat("context_key has ", context_key.size(),
                                                   " bytes; at most ", kMaxContextKeyBytes,
                                                   " are allowed: hash what is longer"));
  }
  return absl::OkStatus();
}

Namespace* StoreCore::FindNamespace(const Session& session, std::string_view context_key) const {
  const auto place = namespaces_.find(
      ComputeNamespaceId(session.spec.tenant, session.spec.profile.id, context_key));
  return place == namespaces_.end() ? nullptr : place->second.get();
}

absl::StatusOr<const Namespace*> StoreCore::FindNamespace(const NamespaceId& id) const {
  const auto place = namespaces_.find(id);
  if (place == namespaces_.end()) {
    return absl::NotFoundError(absl::StrCat("no namespace ", id.Hex(), "; there are ",
                                            namespaces_.size(),
                                            " (a namespace exists while it has pages)"));
  }
  return place->second.get();
}

absl::StatusOr<Namespace*> StoreCore::FindOrMakeNamespace(const Session& session,
                                                          std::string_view context_key) {
  if (Namespace* const found = FindNamespace(session, context_key); found != nullptr) {
    return found;
  }
  if (namespaces_.size() >= options_.max_namespaces) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "no more namespaces: ", namespaces_.size(),
        " have pages, the most that may; evict some (crumbctl evict --all), or use fewer "
        "context keys"));
  }
  auto ns = std::make_unique<Namespace>();
  ns->id = ComputeNamespaceId(session.spec.tenant, session.spec.profile.id, context_key);
  ns->tenant = session.spec.tenant;
  ns->profile = session.spec.profile;
  ns->context_key = context_key;
  ns->pool.namespace_id = ns->id;
  ns->pool.profile_id = ns->profile.id;
  ns->pool.geometry = ns->profile.geometry;
  return namespaces_.emplace(ns->id, std::move(ns)).first->second.get();
}

void StoreCore::DropNamespaceIfEmpty(Namespace* ns) {
  if (ns->tree.empty() && ns->pool.empty()) {
    namespaces_.erase(NamespaceId(ns->id));  // A copy: the key must outlive the element.
  }
}

}  // namespace crumb::store_internal
