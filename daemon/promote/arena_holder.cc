// SPDX-License-Identifier: Apache-2.0
#include "daemon/promote/arena_holder.h"

#include <memory>
#include <utility>

#include "daemon/log/log.h"

namespace crumb {

ArenaHolder::ArenaHolder(PageStore& store, CopyTier& tier)
    : store_(store), tier_(tier), thread_([this] { RunThread(); }) {}

ArenaHolder::~ArenaHolder() {
  store_.StopCopies();
  thread_.join();
}

void ArenaHolder::RunThread() {
  bool has_failed = false;
  // shared: with its chunk.
  while (const std::shared_ptr<ChunkMemory> memory = store_.AwaitNewChunk()) {
    bool is_held = true;
    const absl::Status status = memory->Prepare([&](std::span<const std::byte> bytes) {
      auto hold = tier_.Hold(bytes);
      is_held = hold != nullptr;
      return hold;
    });
    if ((!status.ok() || !is_held) && !std::exchange(has_failed, true)) {  // They fail alike.
      LogEvent(LogLevel::kWarning, "arena_not_held",
               {{"bytes", memory->bytes().size()},
                {"status", status},
                {"effect", "copies to the GPU from this memory are slower"}});
    }
  }
}

}  // namespace crumb
