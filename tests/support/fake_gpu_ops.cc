// SPDX-License-Identifier: Apache-2.0
//
// The ops of the pretended GPU: see fake_gpu.h.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "crumb/cuda/append_rows.h"
#include "crumb/cuda/checksum_pages.h"
#include "crumb/cuda/demote_pages.h"
#include "crumb/cuda/device_profile.h"
#include "crumb/cuda/expand_pages.h"
#include "crumb/cuda/prefill_attention.h"
#include "crumb/cuda/shared_decode.h"
#include "crumb/cuda/split_decode.h"
#include "cuda/launch/demote_finding.h"
#include "proto/base/bfloat16.h"
#include "proto/base/check.h"
#include "proto/base/status_macros.h"
#include "tests/support/fake_gpu.h"

namespace crumb {
namespace {

// An op's twin fails only where the op would have left a finding, or a test is wrong.
void ExpectOk(const absl::Status& status) {
  CRUMB_CHECK(status.ok(), status.ToString().c_str());
}

struct FakeHeads {
  std::vector<HeadParameters> heads;
  std::deque<std::vector<float>> floats;

  const float* Keep(const float* from, size_t count) {
    return from == nullptr ? nullptr : floats.emplace_back(from, from + count).data();
  }
};

// By DeviceHeads::records.
std::map<const std::byte*, FakeHeads>& Profiles() {
  static auto* profiles = new std::map<const std::byte*, FakeHeads>;
  return *profiles;
}

std::span<const HeadParameters> HeadsOf(const DeviceHeads& heads) {
  const auto found = Profiles().find(heads.records);
  CRUMB_CHECK(found != Profiles().end(), "the profile is alive");
  return found->second.heads;
}

bool IsFinite(const std::byte* row, uint32_t dim) {
  for (uint32_t i = 0; i < dim; ++i) {
    BFloat16 value;
    std::memcpy(&value, row + i * sizeof(value), sizeof(value));
    if (!value.IsFinite()) {
      return false;
    }
  }
  return true;
}

// The first position, as findings count them, of a row with NaN or inf.
bool FindBadRow(const DemotePagesParams& params, uint32_t page, uint64_t* position) {
  *position = uint64_t{page} * params.num_layers * params.num_heads * 2 * kPageTokens;
  for (uint32_t layer = 0; layer < params.num_layers; ++layer) {
    for (uint32_t head = 0; head < params.num_heads; ++head) {
      for (const DeviceRows* rows : {&params.keys, &params.values}) {
        for (uint32_t token = 0; token < kPageTokens; ++token, ++*position) {
          const std::byte* row = rows->pages[page] + rows->offset + layer * rows->layer_stride +
                                 head * rows->head_stride + token * rows->token_stride;
          if (!IsFinite(row, params.heads.head_dim)) {
            return true;
          }
        }
      }
    }
  }
  return false;
}

void Demote(const DemotePagesParams& params) {
  for (uint32_t page = 0; page < params.num_pages; ++page) {
    uint64_t position = 0;
    if (FindBadRow(params, page, &position)) {
      uint64_t& finding = params.finding[params.has_finding_per_page ? page : 0];
      finding = std::max(finding, gpu::NonFiniteRowFinding(position));
      continue;
    }
    DemotePagesParams one = params;
    one.num_pages = 1;
    one.keys.pages += page;
    one.values.pages += page;
    one.int2.pages += page;
    ExpectOk(DemotePagesReference(one, HeadsOf(params.heads)));
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceProfile>> DeviceProfile::Create(const Profile& profile) {
  std::vector<HeadParameters> heads;
  const Geometry& geometry = profile.geometry();
  for (uint32_t i = 0; i < geometry.NumHeadBlocks(); ++i) {
    heads.push_back(profile.head(i / geometry.num_kv_heads, i % geometry.num_kv_heads));
  }
  return Create(geometry, heads);
}
absl::StatusOr<std::unique_ptr<DeviceProfile>> DeviceProfile::Create(
    const Geometry& geometry, std::span<const HeadParameters> heads) {
  CRUMB_RETURN_IF_ERROR(FakeGpu::Call("uploading a profile"));
  std::unique_ptr<DeviceProfile> profile(new DeviceProfile);
  profile->memory_ = new std::byte[16];
  profile->heads_ = {.num_layers = geometry.num_layers,
                     .num_kv_heads = geometry.num_kv_heads,
                     .head_dim = geometry.key_dim,
                     .is_aware = HasFeedback(heads[0].codec),
                     .is_tilted = heads[0].codec == CodecId::kOscarInt2Tilted,
                     .records = profile->memory_};
  FakeHeads& fake = Profiles()[profile->memory_];
  const size_t dim = geometry.key_dim;
  for (HeadParameters head : heads) {
    head.key_rotation = fake.Keep(head.key_rotation, dim * dim);
    head.query_rotation = fake.Keep(head.query_rotation, dim * dim);
    head.value_rotation = fake.Keep(head.value_rotation, dim * dim);
    head.key_mean = fake.Keep(head.key_mean, dim);
    head.key_feedback = fake.Keep(head.key_feedback, dim * dim);
    head.key_metric = fake.Keep(head.key_metric, dim * dim);
    head.query_mean = fake.Keep(head.query_mean, dim);
    fake.heads.push_back(head);
  }
  return profile;
}
DeviceProfile::~DeviceProfile() {
  Profiles().erase(memory_);
  delete[] memory_;
}

absl::Status AppendRows(const AppendRowsParams& params, GpuStream /*stream*/) {
  CRUMB_RETURN_IF_ERROR(ValidateAppendRows(params));
  return FakeGpu::Enqueue("append_rows",
                          [=] { ExpectOk(AppendRowsReference(params, HeadsOf(params.heads))); });
}
absl::Status TakeAppendRowsProblem(const AppendRowsParams& params, GpuStream /*stream*/) {
  return ValidateAppendRows(params);
}
absl::StatusOr<size_t> SplitDecodeWorkspaceBytes(const SplitDecodeParams& /*params*/) {
  return 256;
}
absl::Status SplitDecode(const SplitDecodeParams& params, GpuStream /*stream*/) {
  CRUMB_RETURN_IF_ERROR(ValidateSplitDecode(params));
  return FakeGpu::Enqueue("split_decode", [=] { ExpectOk(SplitDecodeReference(params)); });
}
absl::Status TakeSplitDecodeProblem(const SplitDecodeParams& params, GpuStream /*stream*/) {
  return ValidateSplitDecode(params);
}
absl::StatusOr<size_t> SharedDecodeWorkspaceBytes(const SharedDecodeParams& /*params*/) {
  return 256;
}
absl::Status SharedDecode(const SharedDecodeParams& params, GpuStream /*stream*/) {
  CRUMB_RETURN_IF_ERROR(ValidateSharedDecode(params));
  return FakeGpu::Enqueue("shared_decode", [=] { ExpectOk(SharedDecodeReference(params)); });
}
absl::Status PrefillAttention(const PrefillAttentionParams& params, GpuStream /*stream*/) {
  CRUMB_RETURN_IF_ERROR(ValidatePrefillAttention(params));
  return FakeGpu::Enqueue("prefill_attention",
                          [=] { ExpectOk(PrefillAttentionReference(params)); });
}
absl::Status TakePrefillAttentionProblem(const PrefillAttentionParams& params,
                                         GpuStream /*stream*/) {
  return ValidatePrefillAttention(params);
}
absl::Status DemotePages(const DemotePagesParams& params, GpuStream /*stream*/) {
  CRUMB_RETURN_IF_ERROR(ValidateDemotePages(params));
  return FakeGpu::Enqueue("demote_pages", [=] { Demote(params); });
}

absl::Status TakeDemotePagesProblem(const DemotePagesParams& params, GpuStream /*stream*/) {
  FakeGpu::Finish();
  return DescribeDemoteFinding(params, std::exchange(*params.finding, 0));
}
absl::Status ExpandPages(const ExpandPagesParams& params, GpuStream /*stream*/) {
  CRUMB_RETURN_IF_ERROR(ValidateExpandPages(params));
  return FakeGpu::Enqueue("expand_pages",
                          [=] { ExpectOk(ExpandPagesReference(params, HeadsOf(params.heads))); });
}
absl::Status TakeExpandPagesProblem(const ExpandPagesParams& params, GpuStream /*stream*/) {
  return ValidateExpandPages(params);
}
absl::Status ChecksumPages(const ChecksumPagesParams& params, GpuStream /*stream*/) {
  CRUMB_RETURN_IF_ERROR(ValidateChecksumPages(params));
  return FakeGpu::Enqueue("checksum_pages", [=] { ExpectOk(ChecksumPagesReference(params)); });
}

}  // namespace crumb
