// SPDX-License-Identifier: Apache-2.0
//
// How page bytes reach an engine, and leave it: what the session asks of a data plane. One
// PageTransport a session and data plane (the memory map, UCX); one PageSource a looked-up prefix.
// Knows nothing of RPCs: the session hands over what the daemon said in plain structs.
//
// Times are of Clock::System(). All classes here are Thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "crumb/cuda/profile.h"
#include "crumb/sequence.h"
#include "proto/base/ids.h"
#include "proto/page/page_format.h"
#include "proto/wire/memory_socket.h"

namespace crumb {

// What a data plane needs to know of the session: from AttachReply, and the engine's options.
struct SessionInfo {
  SessionId id;
  std::array<uint8_t, kSessionSecretBytes> secret{};
  uint64_t epoch = 0;         // Of the daemon.
  std::string memory_socket;  // Path; empty: the map is not offered.
  std::string ucx_host;       // Empty: UCX is not offered.
  uint32_t ucx_port = 0;
  std::string ucx_version;                 // The daemon's.
  std::shared_ptr<const Profile> profile;  // shared: with the engine, sequences and handles.
  HeadRange heads;                         // Of the rank; count is never 0 here.
  int gpu = -1;                            // On which pages are read in place; -1: on none.
  std::string gpu_note = {};               // Why on none, where the engine named one.
};

// Where one encoding of a page lies in the daemon's arena.
struct BlockPlace {
  ChunkId chunk;  // 0: not there, or not wanted.
  uint32_t block = 0;
  Generation generation;

  bool present() const { return chunk != ChunkId(); }
};

struct PagePlaces {
  BlockPlace int2;
  BlockPlace bf16;
  // Copies of the same in the memory of the engine's GPU, in chunks of copies.
  BlockPlace gpu_int2 = {};
  BlockPlace gpu_bf16 = {};

  const BlockPlace& of(PageEncoding encoding) const {
    return encoding == PageEncoding::kInt2 ? int2 : bf16;
  }
  const BlockPlace& on_gpu(PageEncoding encoding) const {
    return encoding == PageEncoding::kInt2 ? gpu_int2 : gpu_bf16;
  }
};

// A prefix under a lease: pages [0, pages.size()).
struct LeasedPrefix {
  LeaseId lease;
  NamespaceId namespace_id;
  // Every place that is present is to be brought, and no other.
  std::vector<PagePlaces> pages;
};

// The bytes of one leased prefix. Says whether the bytes are right; whether the lease still holds
// is the session's to say. Destroying it ends a pull that is under way.
class PageSource {
 public:
  virtual ~PageSource() = default;

  // As SharedPrefix::HeadBlock: null for an encoding that was not brought or a head of another
  // rank. kv_head counts from 0 in the model. 16-byte aligned.
  virtual const std::byte* HeadBlock(PageIdx page,
                                     PageEncoding encoding,
                                     uint32_t layer,
                                     uint32_t kv_head) const = 0;
  // From this layer on, a head's blocks follow each other by layer, and heads' ranges at a distance
  // of Geometry::HeadRangeBytes, as in an image. In each layer before it, the blocks of a page's
  // heads follow each other.
  virtual uint32_t first_image_layer() const { return 0; }
  // The image of a page in a GPU's memory, read in place: [kv_head][layer] of the model, as
  // Geometry::HeadBlockOffset has it. Null where it is not there; HeadBlock is null where it is.
  virtual const std::byte* GpuPage(PageIdx /*page*/, PageEncoding /*encoding*/) const {
    return nullptr;
  }
  // Has the current GPU read by itself what HeadBlock points to. Otherwise says why it does not;
  // copies work either way.
  virtual absl::Status RegisterWithGpu() {
    return absl::UnimplementedError("this source's memory is not registered with a GPU");
  }
  // For who has copied the bytes and checks the copy, instead of Validate's own pass over them: the
  // checksums that the page's heads of the rank must have. Empty: Validate will not check them.
  virtual std::vector<uint32_t> UncheckedCrc32c(PageIdx /*page*/, PageEncoding /*encoding*/) const {
    return {};
  }
  // The copy had them.
  virtual void SetChecked(PageIdx /*page*/, PageEncoding /*encoding*/) {}
  // Blocks until the bytes of layers [0, layer] are in place, at the longest until the pull's
  // deadline. DATA_LOSS, UNAVAILABLE or DEADLINE_EXCEEDED when they will not be; then for ever.
  virtual absl::Status WaitForLayer(uint32_t layer) = 0;
  // OK only if all bytes are in place, match their checksums, and belong to the generations that
  // the lease named. Blocks as WaitForLayer of the last layer; may be called again and again.
  virtual absl::Status Validate() = 0;
  // Copied into this process so far; 0 for a map.
  virtual size_t copied_bytes() const = 0;
};

// One page on its way to the daemon: the image of the session's heads, [kv_head][layer].
struct OutgoingPage {
  PageIdx page;
  PageEncoding encoding = PageEncoding::kInt2;
  std::span<const std::byte> image;
};

// One data plane of one session. Outlived by nothing: a PageSource keeps what it needs of it.
class PageTransport {
 public:
  virtual ~PageTransport() = default;

  // Makes the pages of a prefix readable, or starts bringing them, in order of layers; `deadline`
  // is that of the last byte. FAILED_PRECONDITION: a page is not what the lease named (another
  // profile, namespace, position or generation). UNAVAILABLE: the daemon does not answer.
  virtual absl::StatusOr<std::unique_ptr<PageSource>> Open(const LeasedPrefix& prefix,
                                                           absl::Time deadline) = 0;

  // Hands over pages of an open publish, before its Commit; the bytes may be reused on return,
  // whatever the result. The pages then lie back to back in the publish's staging memory, from
  // `offset` on: what Commit names with STAGING_UCX. Pages that were there before must have been
  // written. Blocks until the daemon has them or `deadline`; one call a publish at a time, and
  // after an error the publish is to be aborted. INVALID_ARGUMENT: none, or an end beyond
  // kMaxStagingBytes. RESOURCE_EXHAUSTED: the daemon has no room to stage them now. Not for the
  // map, which stages instead (map_transport.h): UNIMPLEMENTED.
  virtual absl::Status SendPages(PublishId publish,
                                 uint64_t offset,
                                 std::span<const OutgoingPage> pages,
                                 absl::Time deadline) = 0;

  // Called now and then by the session: gives up memory that has been idle.
  virtual void Maintain() {}
};

// The UCX data plane of a session, connected: defined in ucx_transport.cc. UNAVAILABLE when the
// daemon does not offer it or cannot be reached by `deadline`; FAILED_PRECONDITION when the two
// ends run different versions of UCX.
absl::StatusOr<std::unique_ptr<PageTransport>> ConnectUcx(const SessionInfo& session,
                                                          absl::Time deadline);

}  // namespace crumb
