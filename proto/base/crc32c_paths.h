// SPDX-License-Identifier: Apache-2.0
//
// The ways in which Crc32c (crc32c.h) can be computed, for its dispatch and for tests that hold
// them against each other. All give the same checksum of the same bytes. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace crumb {

// By table, eight bytes at a time: on every processor.
uint32_t Crc32cByTable(std::span<const std::byte> bytes, uint32_t seed = 0);

// By SSE 4.2's instruction over three streams side by side, since one is bound by the instruction's
// latency of three cycles. Only where HasCrc32cStreams().
bool HasCrc32cStreams();
uint32_t Crc32cByStreams(std::span<const std::byte> bytes, uint32_t seed = 0);

// By carry-less products of AVX-512, 256 bytes at a time: twice the rate of the streams, and one
// stream for the hardware to fetch ahead instead of three. Only where HasCrc32cFolding().
bool HasCrc32cFolding();
uint32_t Crc32cByFolding(std::span<const std::byte> bytes, uint32_t seed = 0);
// The same, and copies: from the registers that are summed, so that the checksum is of what was
// written. Equal lengths; no overlap. StreamByFolding's target lies at a multiple of 64 bytes, and
// its stores, past the caches, are still on their way when it returns.
uint32_t CopyByFolding(std::span<const std::byte> source,
                       std::span<std::byte> target,
                       uint32_t seed = 0);
uint32_t StreamByFolding(std::span<const std::byte> source,
                         std::span<std::byte> target,
                         uint32_t seed = 0);

}  // namespace crumb
