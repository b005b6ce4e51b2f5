// SPDX-License-Identifier: Apache-2.0
//
// One UCX worker on one thread of its own: what both ends of the UCX data plane stand on. UCX's
// names and status codes stop here; the ends see peers, messages and absl::Status.
//
// A message is a small header and a payload. A payload sent by rendezvous goes from the sender's
// memory to memory that the receiver chooses when the message's arrival is announced; the sender's
// bytes must stay as they are until its `done` is called. Active messages only: the context has no
// one-sided feature, since UCX serves emulated gets and puts at any address of the process.
//
// Rules it keeps, each found by a crash (docs/decisions/0061-ucx-settings.md):
//   1. Each memory given to UCX is released by that transfer's `done`, never before. A lost or
//      closed peer's transfers end a little later, some of them with OK.
//   2. Endpoints are closed outside of UCX's callbacks, by force.
//   3. The worker is flushed until all transfers have ended before it is destroyed; if they do not
//      end within a bound, it is leaked together with their memory.
//   4. Nothing but our clock notices a peer that is stopped: a peer whose transfers do not move for
//      `stall_timeout` is closed.
//
// UCX has no authentication and 1.13.1 aborts on forged bytes: its ports are for trusted peers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "proto/base/clock.h"
#include "proto/base/ids.h"

namespace crumb {

// A connection of a worker. Never reused within a worker. 0 is none.
using UcxPeerId = StrongId<struct UcxPeerTag>;

// The version of UCX in this process, as in "1.13.1". Two versions do not connect to each other.
std::string UcxVersion();

// A variable UCX_<NAME> in the environment wins over each setting.
struct UcxOptions {
  // UCX_TLS. With posix in it, a peer that is lost while its queue is full leaves the other one
  // spinning; without tcp there are no connections.
  std::string transports = "cma,tcp";
  // UCX_NET_DEVICES. A worker listens on a port of each device named here.
  std::string devices = "lo";
  std::string port_range;  // UCX_TCP_PORT_RANGE, "from-to". Empty: any.
  absl::Duration stall_timeout = absl::Seconds(10);
  // While payloads are moving, it looks at UCX so often, and at posted tasks at once, instead of
  // being woken by every event: a system call that hands over bytes, or tells the end of a message,
  // takes many times as long if it has to wake the other end. For workers that keep several
  // messages under way. 0: never.
  absl::Duration nap = absl::Microseconds(100);
  uint32_t max_posted = 4096;             // Tasks waiting for the thread; Post refuses beyond.
  std::string thread_name = "crumb-ucx";  // At most 15 characters.
  // Told what no caller can be told. Called on any thread. May be empty.
  std::function<void(std::string_view)> log;
};

enum class UcxSend : uint8_t {
  kCopy,        // Eager: for payloads of some KiB.
  kRendezvous,  // Straight from memory to memory: for payloads from about 64 KiB up.
};

// Called once, on the worker's thread, when a transfer has ended and its memory is free again;
// perhaps before the call that began it returns.
using UcxDone = absl::AnyInvocable<void(const absl::Status&)>;

// A message that has arrived. Alive during OnMessage; Confined to the worker's thread.
class UcxMessage {
 public:
  virtual std::span<const std::byte> header() const = 0;
  virtual size_t payload_bytes() const = 0;
  // The payload of a message sent by copy. Empty for a rendezvous, whose bytes are not here yet.
  virtual std::span<const std::byte> payload() const = 0;
  // Takes the payload into `target`, which has payload_bytes() bytes and is UCX's until `done`. At
  // most once. A payload that is not taken is dropped, which ends the sender's transfer with OK.
  virtual void Receive(std::span<std::byte> target, UcxDone done) = 0;

 protected:
  ~UcxMessage() = default;
};

class UcxWorker {
 public:
  // All calls come on the worker's thread. They must not block.
  class Handler {
   public:
    // A peer has connected to the listener. False turns it away.
    virtual bool OnPeer(UcxPeerId peer) = 0;
    virtual void OnMessage(UcxPeerId peer, UcxMessage& message) = 0;
    // The peer is gone, for `reason`: it died, it stalled, or Close was called. Transfers with it
    // that have not ended will still call their `done`.
    virtual void OnLost(UcxPeerId peer, const absl::Status& reason) = 0;
    // Again and again while there is work, after posted tasks and before UCX's next progress: for
    // what is better not done in UCX's callbacks. True: call it again soon.
    virtual bool OnTurn() { return false; }
    // Every millisecond while there is work, and at least every 100 ms.
    virtual void OnTick(absl::Time now) = 0;

   protected:
    ~Handler() = default;
  };

  // Longest header of a message.
  static constexpr size_t kMaxHeaderBytes = 256;

  // Starts the thread. The handler must outlive the worker, and is first called after Listen or
  // Connect, but for OnTick. UNAVAILABLE, with UCX's reason, when the transports or devices are not
  // there; INVALID_ARGUMENT for a setting that UCX does not take.
  static absl::StatusOr<std::unique_ptr<UcxWorker>> Create(const UcxOptions& options,
                                                           Handler& handler,
                                                           const Clock& clock = Clock::System());
  // Closes all peers and waits for their transfers to end, at most 3 s; `done`s are called, OnLost
  // is not. Not on the worker's own thread.
  ~UcxWorker();
  UcxWorker(const UcxWorker&) = delete;
  UcxWorker& operator=(const UcxWorker&) = delete;

  // Has `task` run on the worker's thread. RESOURCE_EXHAUSTED at max_posted tasks, UNAVAILABLE when
  // the worker is ending. Thread-safe.
  absl::Status Post(absl::AnyInvocable<void()> task);
  // Runs `task` on the worker's thread and waits for its end. Thread-safe, but not on the worker's
  // own thread.
  absl::Status Call(absl::AnyInvocable<absl::Status()> task);

  // The rest is Confined to the worker's thread.

  // Accepts peers at a numeric address; port 0 is any free one. Returns the port. UNAVAILABLE when
  // it is in use.
  absl::StatusOr<uint16_t> Listen(const std::string& host, uint16_t port);
  // Begins to connect; failure is told by OnLost. INVALID_ARGUMENT: not a numeric address.
  absl::StatusOr<UcxPeerId> Connect(const std::string& host, uint16_t port);
  // Sends a message. The header is copied; the payload must stay as it is until `done`. To a peer
  // that is gone: done(UNAVAILABLE).
  void Send(UcxPeerId peer,
            std::span<const std::byte> header,
            std::span<const std::byte> payload,
            UcxSend how,
            UcxDone done);
  // Ends the connection soon; OnLost follows with `reason`. Unknown peers are no error.
  void Close(UcxPeerId peer, absl::Status reason);

 private:
  class Impl;
  explicit UcxWorker(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace crumb
