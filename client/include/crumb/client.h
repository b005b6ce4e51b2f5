// SPDX-License-Identifier: Apache-2.0
//
// An engine's connection to its node's crumbd: attach, look prefixes up, publish. Owns the session,
// its background threads (lease renewal, reconnection) and the data plane (memory map, UCX).
//
// The daemon may be absent, die and come back at any time. Then calls return UNAVAILABLE with the
// reason, at the latest at the deadline they were given; prefixes held fail their Validate(); the
// client attaches anew in the background and goes on with a new session. An engine never has to
// restart, and never blocks on a dead daemon for longer than it said.
//
// Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "crumb/cuda/profile.h"
#include "crumb/gpu_upload.h"
#include "crumb/sequence.h"

namespace crumb {

enum class DataPlane {
  kAuto,  // The map where the daemon is on this node and offers it, UCX otherwise.
  kMap,   // Sealed memfds, read in place. Same node.
  kUcx,   // Copied over UCX into this process's memory.
};

struct ClientOptions {
  std::string address = "unix:/run/crumb/crumbd.sock";  // Or "host:port".
  std::string client_name = "engine";                   // For people. UTF-8, 1 to 128 bytes.
  std::string tenant = "default";                       // 1 to 128 of A-Z a-z 0-9 _ . -
  std::shared_ptr<const Profile> profile = nullptr;     // shared: outlives the engine's handle.
  HeadRange heads = {};
  DataPlane data_plane = DataPlane::kAuto;
  // Mapped pages are checked against their checksums before their first use (pulled ones always).
  bool verify_mapped_pages = true;
  absl::Duration reconnect_backoff_max = absl::Seconds(5);
  // Number of the GPU on which lookups may read pages in place, as CUDA counts them in this
  // process; -1: on none.
  int gpu = -1;
};

struct LookupOptions {
  // What else changes the KV cache: a LoRA adapter, a salt. UTF-8, at most 256 bytes.
  std::string context_key = {};
  bool allow_int2_window = false;
  // Pages that the daemon has in the memory of ClientOptions::gpu are read there: by GpuPage, and
  // not by HeadBlock. Others are in host memory as without it. Needs the map; no effect without.
  bool on_gpu = false;
  absl::Duration timeout = absl::Seconds(1);        // Of the lookup itself.
  absl::Duration pull_timeout = absl::Seconds(30);  // Of a pull's bytes, from the lookup on.
};

// What a lookup found. Holds a lease that is renewed in the background until this is destroyed.
class PrefixHandle : public SharedPrefix {
 public:
  virtual uint32_t usable_tokens() const = 0;  // num_pages() * kPageTokens; 0: a miss.
  virtual uint32_t matched_tokens() const = 0;
  virtual uint32_t trimmed_tokens() const = 0;  // Given up to keep the recent window in BF16.
  virtual DataPlane data_plane() const = 0;     // By which the bytes come.
  // Bytes copied into this process by the data plane: 0 for a map.
  virtual size_t copied_bytes() const = 0;
  // ClientOptions::heads: of others' head blocks there is nothing to be read. count 0: all.
  virtual HeadRange heads() const { return {}; }
  // ClientOptions::gpu, whose memory GpuPage and UploadToGpu speak of; -1: none.
  virtual int gpu() const { return -1; }
  // The image of a page in the memory of ClientOptions::gpu, read in place: head blocks of all KV
  // heads of the model, that of (layer, kv_head) at Geometry::HeadBlockOffset. What page tables of
  // SplitDecode take. Null where the page is not there. Alive as long as this object: wait for the
  // kernels that read it before destroying it. As all reads, to be believed after Validate.
  virtual const std::byte* GpuPage(PageIdx /*page*/, PageEncoding /*encoding*/) const {
    return nullptr;
  }
  // Brings the whole prefix to ClientOptions::gpu: what is there already stays in place, the rest
  // is copied. Returns when the copies are enqueued. The prefix must outlive it.
  // FAILED_PRECONDITION: no pages, or ClientOptions::gpu is not given. RESOURCE_EXHAUSTED: no
  // device memory.
  virtual absl::StatusOr<std::unique_ptr<GpuUpload>> UploadToGpu(
      const GpuUploadOptions& /*options*/) {
    return absl::UnimplementedError("this prefix does not come from a daemon");
  }
  // Copies a page's image of the rank's heads, [kv_head][layer] head blocks, for engines that keep
  // pages in memory of their own. Blocks until the bytes are there. NOT_FOUND: not in that
  // encoding. INVALID_ARGUMENT: image of another size. As all reads, to be believed after Validate.
  virtual absl::Status CopyPage(PageIdx page,
                                PageEncoding encoding,
                                std::span<std::byte> image) = 0;
};

// Pages of a live sequence that an engine keeps in the memory of its GPU, for publishing.
class GpuPages {
 public:
  virtual ~GpuPages() = default;

  virtual uint32_t length() const = 0;  // Tokens.
  // Of the rows; null where who keeps the pages does not say. A publish by a client of another
  // profile, or of other heads, is refused.
  virtual const ProfileId* profile_id() const { return nullptr; }
  virtual HeadRange heads() const { return {}; }  // With profile_id.
  // The page's image of the rank's heads in device memory, [kv_head][layer] head blocks, as
  // DemotePages and AppendRows write them; null where it is not held in that encoding. All that
  // writes it must have ended, and it must stay until the publish returns.
  virtual const std::byte* Page(PageIdx page, PageEncoding encoding) const = 0;
  // Asked once pages were copied: OK only if they are what they should be. A publish fails with
  // what this says, and nothing of it becomes visible.
  virtual absl::Status Validate() const { return absl::OkStatus(); }
};

struct PublishOptions {
  std::string context_key = {};  // As LookupOptions.
  absl::Duration timeout = absl::Seconds(30);
};

struct PublishResult {
  uint32_t pages_added = 0;
  uint32_t pages_present = 0;  // Were there before, or came from someone else meanwhile.
  uint32_t tail_pages = 0;     // Of those handed over, in BF16 for the next engine's recent window.
  size_t bytes_sent = 0;
};

struct ClientState {
  bool attached = false;
  uint64_t epoch = 0;  // Of the daemon; 0 before the first attach.
  uint64_t session_id = 0;
  uint64_t num_attaches = 0;
  DataPlane data_plane = DataPlane::kAuto;  // In use; kAuto while not attached.
  std::string data_plane_note;              // Why it is not the map; empty where it is.
  bool reads_gpu_pages = false;  // Lookups on_gpu find pages in the memory of ClientOptions::gpu.
  std::string gpu_note;          // Why they do not, where ClientOptions::gpu is given.
  bool draining = false;
  absl::Status last_error;  // Why it is not attached, or was not.
};

class Client {
 public:
  // Starts connecting and returns at once. INVALID_ARGUMENT names the option.
  static absl::StatusOr<std::unique_ptr<Client>> Create(ClientOptions options);
  virtual ~Client() = default;

  // OK once attached; otherwise the reason it is not, at the timeout. A refusal that retrying
  // cannot mend (another version, malformed profile) is returned at once.
  virtual absl::Status WaitAttached(absl::Duration timeout) = 0;
  virtual ClientState state() const = 0;

  // The longest usable published prefix of `tokens`, the whole prompt. A miss is OK with no pages.
  // INVALID_ARGUMENT: too many tokens, an id beyond any vocabulary, a bad context key. UNAVAILABLE:
  // not attached. DEADLINE_EXCEEDED.
  virtual absl::StatusOr<std::shared_ptr<PrefixHandle>> Lookup(std::span<const uint32_t> tokens,
                                                               const LookupOptions& options) = 0;

  // Publishes the first tokens.size() tokens of the sequence, a multiple of the page size and
  // within its length. Pages still held in BF16 go as such and are demoted by the daemon; the
  // sequence must not change meanwhile. RESOURCE_EXHAUSTED: no room, or the daemon's
  // demotion queue was full until the deadline; go on without. Nothing is
  // visible unless OK, and then all of it at once.
  virtual absl::StatusOr<PublishResult> Publish(const Sequence& sequence,
                                                std::span<const uint32_t> tokens,
                                                const PublishOptions& options) = 0;
  // The same from the memory of ClientOptions::gpu; each page's rows are read there once.
  // FAILED_PRECONDITION also: ClientOptions::gpu is not given. INVALID_ARGUMENT also: a page is not
  // in that memory.
  virtual absl::StatusOr<PublishResult> PublishFromGpu(const GpuPages& pages,
                                                       std::span<const uint32_t> tokens,
                                                       const PublishOptions& options) = 0;
};

}  // namespace crumb
