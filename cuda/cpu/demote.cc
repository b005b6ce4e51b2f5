// SPDX-License-Identifier: Apache-2.0
#include "crumb/cuda/demote.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

#include "crumb/cuda/rotate.h"
#include "cuda/cpu/demote_kernel.h"
#include "cuda/cpu/pack_codes.h"
#include "cuda/reference/demote.h"
#include "proto/base/check.h"
#include "proto/base/status_macros.h"
#include "proto/page/page_format.h"

namespace crumb {
namespace {

enum class Operand { kKey, kValue };

// Where a row of a page holds NaN or inf.
struct NonFinite {
  Operand operand;
  uint32_t token;
  uint32_t channel;
  float value;
};

bool AllFinite(std::span<const BFloat16> rows) {
  uint16_t carries = 0;  // Bit 15: from exponents of all ones. Without a branch, it vectorises.
  for (size_t i = 0; i < rows.size(); ++i) {
    carries |= static_cast<uint16_t>((rows[i].bits & 0x7fffu) + 0x0080u);
  }
  return carries < 0x8000;
}

std::optional<NonFinite> FindNonFinite(Operand operand,
                                       std::span<const BFloat16> rows,
                                       uint32_t dim) {
  if (AllFinite(rows)) {
    return std::nullopt;
  }
  for (uint32_t i = 0;; ++i) {
    if (!rows[i].IsFinite()) {
      return NonFinite{operand, i / dim, i % dim, rows[i].ToFloat()};
    }
  }
}

std::optional<NonFinite> FindNonFinite(const HeadParameters& head,
                                       std::span<const BFloat16> keys,
                                       std::span<const BFloat16> values) {
  auto found = FindNonFinite(Operand::kKey, keys, head.key_dim);
  return found ? found : FindNonFinite(Operand::kValue, values, head.value_dim);
}

absl::Status NonFiniteError(const NonFinite& found, const std::string& position) {
  return absl::InvalidArgumentError(
      absl::StrCat(found.operand == Operand::kKey ? "K" : "V", " holds ", found.value, " at ",
                   position, "channel ", found.channel,
                   "; a page takes finite values only: recompute it, do not cache it"));
}

using DemoteRowsFunction = void (*)(const cpu::DemoteArgs& args);

DemoteRowsFunction DemoteRowsOf(CpuPath path) {
#if defined(__x86_64__)
  if (path == CpuPath::kAvx512) {
    return cpu::DemoteRowsAvx512;
  }
  if (path == CpuPath::kAvx2) {
    return cpu::DemoteRowsAvx2;
  }
#endif
  CRUMB_CHECK(path == CpuPath::kPortable, "this path is not in the build");
  return cpu::DemoteRowsPortable;
}

// Demotes head blocks on one path, with the memory that its kernels need.
class Demoter {
 public:
  Demoter(uint32_t key_dim, uint32_t value_dim, CpuPath path) : path_(path) {
    if (path != CpuPath::kReference) {
      const size_t dim = std::max(key_dim, value_dim);
      demote_rows_ = DemoteRowsOf(path);
      memory_.resize(cpu::kDemoteScratch * dim / 16 + dim);
    }
  }

  void Demote(const HeadParameters& head,
              std::span<const BFloat16> keys,
              std::span<const BFloat16> values,
              std::span<std::byte> block) {
    const bool aware = HasFeedback(head.codec);
    const bool tilted = head.codec == CodecId::kOscarInt2Tilted;
    CRUMB_CHECK(!aware || head.key_feedback != nullptr, "this codec needs key_feedback");
    CRUMB_CHECK(!tilted || (head.key_metric != nullptr && head.query_mean != nullptr),
                "oscar-int2-tilted needs key_metric and query_mean");
    if (path_ == CpuPath::kReference) {
      reference::DemoteHeadBlock(head, keys, values, block);
      return;
    }
    const Int2HeadBlock format{head.key_dim, head.value_dim};
    const uint8_t* codes = DemoteRows({.rows = keys.data(),
                                       .dim = head.key_dim,
                                       .clip = head.key_clip,
                                       .by_deviation = head.codec == CodecId::kOscarInt2Lm,
                                       .feedback = aware ? head.key_feedback : nullptr,
                                       .ranges = head.key_ranges.data(),
                                       .metric = tilted ? head.key_metric : nullptr,
                                       .query_mean = tilted ? head.query_mean : nullptr},
                                      block.data() + format.key_meta_offset());
    cpu::PackKeyCodes(codes, head.key_dim, block.data() + format.key_codes_offset());
    codes = DemoteRows({.rows = values.data(),
                        .dim = head.value_dim,
                        .clip = head.value_clip,
                        .by_deviation = head.values_by_deviation},
                       block.data() + format.value_meta_offset());
    cpu::PackValueCodes(codes, head.value_dim, block.data() + format.value_codes_offset());
  }

 private:
  struct alignas(64) CacheLine {
    float floats[16];
  };

  const uint8_t* DemoteRows(cpu::DemoteArgs args, std::byte* meta) {
    uint16_t scales[kPageTokens];
    uint16_t minima[kPageTokens];
    args.scratch = memory_[0].floats;
    args.codes = reinterpret_cast<uint8_t*>(memory_[cpu::kDemoteScratch * args.dim / 16].floats);
    args.scales = scales;
    args.minima = minima;
    demote_rows_(args);
    cpu::PackMeta(scales, minima, meta);
    return args.codes;
  }

  const CpuPath path_;
  DemoteRowsFunction demote_rows_ = nullptr;
  std::vector<CacheLine> memory_;
};

// One head block after the other of KV heads [first_head, first_head + num_heads).
class PageWalk {
 public:
  PageWalk(const Profile& profile, HeadRange heads, uint32_t first_token)
      : profile_(profile),
        heads_(heads),
        first_token_(first_token),
        bf16_(profile.geometry().Bf16Block()) {
    const uint32_t all = profile.geometry().num_kv_heads;
    CRUMB_CHECK(heads.first <= all && heads.count <= all - heads.first,
                "KV heads beyond the profile");
  }

  size_t num_blocks() const { return size_t{heads_.count} * profile_.geometry().num_layers; }
  size_t bf16_bytes() const { return num_blocks() * bf16_.bytes(); }
  const HeadParameters& head(size_t block) const { return profile_.head(layer(block), kv(block)); }

  // K or V rows of BF16 head block `block`.
  template <typename Row, typename Byte>
  std::span<Row> Keys(std::span<Byte> image, size_t block) const {
    return Rows<Row>(image, block, bf16_.key_offset(), bf16_.key_dim);
  }
  template <typename Row, typename Byte>
  std::span<Row> Values(std::span<Byte> image, size_t block) const {
    return Rows<Row>(image, block, bf16_.value_offset(), bf16_.value_dim);
  }

  absl::Status CheckFinite(std::span<const std::byte> image, size_t block) const {
    const auto found = FindNonFinite(head(block), Keys<const BFloat16>(image, block),
                                     Values<const BFloat16>(image, block));
    if (!found) {
      return absl::OkStatus();
    }
    return NonFiniteError(*found,
                          absl::StrCat("layer ", layer(block), ", KV head ", kv(block), ", token ",
                                       uint64_t{first_token_} + found->token, ", "));
  }

 private:
  uint32_t layer(size_t block) const {
    return static_cast<uint32_t>(block % profile_.geometry().num_layers);
  }
  uint32_t kv(size_t block) const {
    return heads_.first + static_cast<uint32_t>(block / profile_.geometry().num_layers);
  }

  template <typename Row, typename Byte>
  std::span<Row> Rows(std::span<Byte> image, size_t block, size_t offset, uint32_t dim) const {
    auto* rows = reinterpret_cast<Row*>(image.data() + block * bf16_.bytes() + offset);
    CRUMB_CHECK(reinterpret_cast<uintptr_t>(rows) % alignof(BFloat16) == 0, "unaligned BF16 rows");
    return {rows, size_t{kPageTokens} * dim};
  }

  const Profile& profile_;
  const HeadRange heads_;
  const uint32_t first_token_;
  const Bf16HeadBlock bf16_;
};

// The engine's rows as the rotation wants them.
std::span<const float> ToFloats(std::span<const BFloat16> rows, std::vector<float>& floats) {
  floats.resize(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    floats[i] = rows[i].ToFloat();
  }
  return floats;
}

}  // namespace

absl::Status DemoteHeadBlock(const HeadParameters& head,
                             std::span<const BFloat16> keys,
                             std::span<const BFloat16> values,
                             std::span<std::byte> block,
                             CpuPath path) {
  CRUMB_CHECK(keys.size() == size_t{kPageTokens} * head.key_dim, "keys of another length");
  CRUMB_CHECK(values.size() == size_t{kPageTokens} * head.value_dim, "values of another length");
  CRUMB_CHECK(block.size() == (Int2HeadBlock{head.key_dim, head.value_dim}.bytes()),
              "block of another length");
  if (const auto found = FindNonFinite(head, keys, values)) {
    return NonFiniteError(*found, absl::StrCat("token ", found->token, " of the page, "));
  }
  Demoter(head.key_dim, head.value_dim, path).Demote(head, keys, values, block);
  return absl::OkStatus();
}

absl::Status DemotePage(const Profile& profile,
                        HeadRange heads,
                        uint32_t first_token,
                        std::span<const std::byte> bf16,
                        std::span<std::byte> int2,
                        CpuPath path) {
  const PageWalk walk(profile, heads, first_token);
  const size_t int2_bytes = profile.geometry().Int2Block().bytes();
  CRUMB_CHECK(bf16.size() == walk.bf16_bytes(), "BF16 image of another length");
  CRUMB_CHECK(int2.size() == walk.num_blocks() * int2_bytes, "INT2 image of another length");
  Demoter demoter(profile.geometry().key_dim, profile.geometry().value_dim, path);
  for (size_t block = 0; block < walk.num_blocks(); ++block) {
    CRUMB_RETURN_IF_ERROR(walk.CheckFinite(bf16, block));
    demoter.Demote(walk.head(block), walk.Keys<const BFloat16>(bf16, block),
                   walk.Values<const BFloat16>(bf16, block),
                   int2.subspan(block * int2_bytes, int2_bytes));
  }
  return absl::OkStatus();
}

absl::Status RotatePage(const Profile& profile,
                        HeadRange heads,
                        uint32_t first_token,
                        std::span<const std::byte> plain,
                        std::span<std::byte> stored,
                        CpuPath path) {
  const PageWalk walk(profile, heads, first_token);
  CRUMB_CHECK(plain.size() == walk.bf16_bytes(), "plain image of another length");
  CRUMB_CHECK(stored.size() == plain.size(), "stored image of another length");
  std::vector<float> floats;
  for (size_t block = 0; block < walk.num_blocks(); ++block) {
    CRUMB_RETURN_IF_ERROR(walk.CheckFinite(plain, block));
    RotateKeys(walk.head(block), ToFloats(walk.Keys<const BFloat16>(plain, block), floats),
               walk.Keys<BFloat16>(stored, block), path);
    RotateValues(walk.head(block), ToFloats(walk.Values<const BFloat16>(plain, block), floats),
                 walk.Values<BFloat16>(stored, block), path);
    // Finite rows near the end of the range can still overflow on the way.
    CRUMB_RETURN_IF_ERROR(walk.CheckFinite(stored, block));
  }
  return absl::OkStatus();
}

}  // namespace crumb
