// SPDX-License-Identifier: Apache-2.0
#include "tests/client/gpu/gpu_scene.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <utility>

#include "gtest/gtest.h"

#include "crumb/cuda/rotate.h"
#include "crumb/cuda/transfer.h"
#include "proto/base/bfloat16.h"
#include "proto/base/check.h"
#include "proto/base/float16.h"
#include "proto/base/status_macros.h"

namespace crumb {
namespace {

constexpr uint32_t kGroup = 2;

void ExpectOk(const absl::Status& status) {
  CRUMB_CHECK(status.ok(), status.ToString().c_str());
}

uint16_t ToBits(float value, ElementType type) {
  return type == ElementType::kFp16 ? Float16::FromFloat(value).bits
                                    : BFloat16::FromFloat(value).bits;
}

float FromBits(uint16_t bits, ElementType type) {
  return type == ElementType::kFp16 ? Float16{bits}.ToFloat() : BFloat16{bits}.ToFloat();
}

float ToFloat(const std::byte* element, ElementType type) {
  if (type == ElementType::kFloat32) {
    float value = 0;
    std::memcpy(&value, element, sizeof(value));
    return value;
  }
  uint16_t bits = 0;
  std::memcpy(&bits, element, sizeof(bits));
  return FromBits(bits, type);
}

std::vector<float> SignedPermutation(uint32_t dim, std::mt19937* random) {
  std::vector<uint32_t> order(dim);
  std::iota(order.begin(), order.end(), 0u);
  std::shuffle(order.begin(), order.end(), *random);
  std::vector<float> matrix(size_t{dim} * dim);
  for (size_t row = 0; row < dim; ++row) {
    matrix[row * dim + order[row]] = (*random)() % 2 == 0 ? 1.0f : -1.0f;
  }
  return matrix;
}

Geometry RankGeometry(const GpuSceneOptions& options) {
  Geometry geometry = options.profile->geometry();
  geometry.num_kv_heads = options.heads.Resolve(geometry.num_kv_heads).count;
  return geometry;
}

template <typename T>
T Value(absl::StatusOr<T> value) {
  ExpectOk(value.status());
  return *std::move(value);
}

}  // namespace

std::shared_ptr<const Profile> MakeExactProfile(const Geometry& geometry, const Windows& windows) {
  std::mt19937 random(11);
  ProfileParts parts;
  parts.model = "exact";
  parts.geometry = geometry;
  parts.codec = CodecId::kOscarInt2;
  parts.windows = windows;
  for (size_t i = 0; i < geometry.NumHeadBlocks(); ++i) {
    for (std::vector<float>* rotations : {&parts.key_rotation, &parts.value_rotation}) {
      const auto matrix = SignedPermutation(geometry.key_dim, &random);
      rotations->insert(rotations->end(), matrix.begin(), matrix.end());
    }
    parts.key_clip.push_back(0.96f);
    parts.value_clip.push_back(0.92f);
  }
  return Value(Profile::Parse(Value(Profile::Serialize(parts))));
}

DevicePrefix::DevicePrefix(const Sequence& sequence, uint32_t num_pages)
    : num_pages_(num_pages), profile_id_(sequence.profile().id()), images_(size_t{num_pages} * 2) {
  const Geometry& geometry = sequence.profile().geometry();
  const size_t page_bytes = geometry.PageBytes(PageEncoding::kBf16);  // The larger.
  memory_ = Value(OwnGpuMemory::Create(images_.size() * page_bytes));
  const auto stream = Value(OwnGpuStream::Create());
  for (uint32_t page = 0; page < num_pages; ++page) {
    for (const PageEncoding encoding : {PageEncoding::kInt2, PageEncoding::kBf16}) {
      if (!sequence.HasPage(PageIdx(page), encoding)) {
        continue;
      }
      std::vector<std::byte> image(geometry.PageBytes(encoding));
      ExpectOk(sequence.ExportPage(PageIdx(page), encoding, image));
      const size_t index = Index(PageIdx(page), encoding);
      std::byte* const to = memory_->data() + index * page_bytes;
      ExpectOk(CopyToGpu(to, image, stream->get()));
      ExpectOk(stream->Wait());
      images_[index] = to;
    }
  }
}

GpuScene::GpuScene(const GpuSceneOptions& options)
    : options_(options),
      geometry_(RankGeometry(options)),
      heads_(options.heads.Resolve(options.profile->geometry().num_kv_heads)),
      query_heads_(kGroup * geometry_.num_kv_heads) {
  const ScopedGpu current(options.gpu);
  ExpectOk(current.status());
  stream_ = Value(OwnGpuStream::Create());
  pool_ = Value(GpuPagePool::Create({.profile = options.profile,
                                     .heads = options.heads,
                                     .gpu = options.gpu,
                                     .int2_pages = options.int2_pages,
                                     .bf16_pages = options.bf16_pages,
                                     .keeps_outputs_rotated = options.keeps_outputs_rotated}));
  batch_ = Value(GpuBatch::Create({.pool = pool_.get(),
                                   .num_query_heads = query_heads_,
                                   .max_sequences = options.max_sequences,
                                   .max_tokens = options.max_tokens,
                                   .max_length = kMaxTokens,
                                   .type = options.type,
                                   .out_type = options.out_type}));
  const size_t tokens = size_t{geometry_.num_layers} * options.max_tokens;
  rows_ = Value(OwnGpuMemory::Create(tokens * TokenBytes()));
  out_ = Value(OwnGpuMemory::Create(tokens * query_heads_ * geometry_.key_dim * sizeof(float)));
}

uint32_t GpuScene::NumHeads(Kind kind) const {
  return kind == Kind::kQuery ? query_heads_ : geometry_.num_kv_heads;
}

size_t GpuScene::TokenBytes() const {
  return size_t{query_heads_ + 2 * geometry_.num_kv_heads} * geometry_.key_dim * sizeof(uint16_t);
}

size_t GpuScene::OutBytes() const {
  return size_t{query_heads_} * geometry_.key_dim * ElementBytes(options_.out_type);
}

void GpuScene::Wait() const {
  ExpectOk(stream_->Wait());
}

std::unique_ptr<GpuSequence> GpuScene::NewSequence(uint32_t max_tokens) const {
  return Value(GpuSequence::Create({.pool = pool_.get(), .max_tokens = max_tokens}));
}

std::unique_ptr<GpuScene::Live> GpuScene::NewLive(uint32_t seed) const {
  auto live = std::make_unique<Live>();
  live->seed = seed;
  live->gpu = NewSequence();
  live->cpu = Value(Sequence::Create(
      {.profile = options_.profile, .num_query_heads = query_heads_, .heads = heads_}));
  return live;
}

std::vector<float> GpuScene::Rows(
    const Live& live, Kind kind, uint32_t layer, uint32_t first, uint32_t count) const {
  const size_t width = size_t{NumHeads(kind)} * geometry_.key_dim;
  std::vector<float> rows(count * width);
  for (size_t i = 0; i < rows.size(); ++i) {
    uint64_t x = first * width + i + (uint64_t{live.seed} << 40) + (uint64_t{layer} << 32) +
                 (static_cast<uint64_t>(kind) << 36);
    x = (x ^ x >> 33) * 0xff51afd7ed558ccdull;
    x = (x ^ x >> 29) * 0xc4ceb9fe1a85ec53ull;
    // The sum of four bytes: about normal.
    const auto sum =
        static_cast<float>((x >> 56) + (x >> 48 & 255) + (x >> 40 & 255) + (x >> 32 & 255));
    rows[i] = FromBits(ToBits((sum - 510) / 148, options_.type), options_.type);
  }
  const bool is_spoilt = kind == Kind::kKey && spoilt.layer == layer && spoilt.seed == live.seed;
  if (is_spoilt && spoilt.position >= first && spoilt.position < first + count) {
    rows[(spoilt.position - first) * width + 1] = std::nanf("");
  }
  return rows;
}

absl::Status GpuScene::Begin(std::span<const Member> members,
                             uint32_t replayed_rows,
                             bool reads_prefix_once) {
  std::vector<GpuBatch::Member> of_batch;
  for (const Member& member : members) {
    of_batch.push_back({member.live->gpu.get(), member.num_tokens});
  }
  return batch_->BeginStep(
      {.members = of_batch, .replayed_rows = replayed_rows, .reads_prefix_once = reads_prefix_once},
      stream());
}

void GpuScene::EnqueueRows(std::span<const Member> members) {
  std::vector<std::byte>& host = host_rows_.emplace_back(rows_->bytes());
  const auto store = [&](const std::vector<float>& row, std::byte** to) {
    for (const float value : row) {
      const uint16_t bits = ToBits(value, options_.type);
      std::memcpy(*to, &bits, sizeof(bits));
      *to += sizeof(bits);
    }
  };
  for (uint32_t layer = 0; layer < geometry_.num_layers; ++layer) {
    std::byte* to = host.data() + layer * options_.max_tokens * TokenBytes();
    for (const Member& member : members) {
      for (uint32_t i = 0; i < member.num_tokens; ++i) {
        for (const Kind kind : {Kind::kQuery, Kind::kKey, Kind::kValue}) {
          store(Rows(*member.live, kind, layer, member.live->gpu->length() + i, 1), &to);
        }
      }
    }
  }
  ExpectOk(CopyToGpu(rows_->data(), host, stream()));
}

GpuBatch::LayerRows GpuScene::RowsOf(uint32_t layer) const {
  const size_t head = geometry_.key_dim * sizeof(uint16_t);
  const std::byte* rows = rows_->data() + layer * options_.max_tokens * TokenBytes();
  return {.queries = {rows, TokenBytes()},
          .keys = {rows + query_heads_ * head, TokenBytes()},
          .values = {rows + (query_heads_ + geometry_.num_kv_heads) * head, TokenBytes()},
          .out = out_->data() + layer * options_.max_tokens * OutBytes()};
}

absl::Status GpuScene::TryLayers(GpuStream stream) {
  for (uint32_t layer = 0; layer < geometry_.num_layers; ++layer) {
    CRUMB_RETURN_IF_ERROR(batch_->Layer(layer, RowsOf(layer), stream));
  }
  return absl::OkStatus();
}

void GpuScene::EnqueueLayers() {
  const absl::Status status = TryLayers();
  ASSERT_TRUE(status.ok()) << status;
}

std::unique_ptr<StepGraph> GpuScene::Capture(uint32_t num_rows, bool reads_prefix_once) {
  auto graph = StepGraph::Capture([&](GpuStream captured) {
    for (uint32_t layer = 0; layer < geometry_.num_layers; ++layer) {
      const absl::Status status =
          reads_prefix_once ? batch_->DecodeSharedLayer(layer, num_rows, RowsOf(layer), captured)
                            : batch_->DecodeLayer(layer, num_rows, RowsOf(layer), captured);
      ASSERT_TRUE(status.ok()) << status;
    }
  });
  graph->num_rows = num_rows;
  return graph;
}

void GpuScene::EnqueueDownload(Outputs* outputs, uint32_t num_tokens) {
  outputs->layers.assign(geometry_.num_layers, std::vector<std::byte>(num_tokens * OutBytes()));
  for (uint32_t layer = 0; layer < geometry_.num_layers; ++layer) {
    ExpectOk(CopyFromGpu(outputs->layers[layer],
                         out_->data() + layer * options_.max_tokens * OutBytes(), stream()));
  }
}

std::vector<std::vector<float>> GpuScene::RunCpu(const Member& member) const {
  const Live& live = *member.live;
  const uint32_t first = live.cpu->length();
  const uint32_t count = member.num_tokens;
  std::vector<std::vector<float>> out(geometry_.num_layers);
  ExpectOk(live.cpu->BeginChunk(count));
  for (uint32_t layer = 0; layer < geometry_.num_layers; ++layer) {
    const std::vector<float> queries = Rows(live, Kind::kQuery, layer, first, count);
    out[layer].resize(queries.size());
    ExpectOk(live.cpu->Append(layer, Rows(live, Kind::kKey, layer, first, count),
                              Rows(live, Kind::kValue, layer, first, count)));
    ExpectOk(live.cpu->Attend(layer, queries, out[layer]));
  }
  ExpectOk(live.cpu->EndChunk());
  return out;
}

// Outputs in the coordinates of the model, whoever rotated them back.
std::vector<float> GpuScene::ToModel(uint32_t layer, std::span<const std::byte> outputs) const {
  const size_t element = ElementBytes(options_.out_type);
  std::vector<float> rows(outputs.size() / element);
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i] = ToFloat(outputs.data() + i * element, options_.out_type);
  }
  if (!options_.keeps_outputs_rotated) {
    return rows;
  }
  std::vector<float> unrotated(rows.size());
  const size_t dim = geometry_.key_dim;
  for (size_t row = 0; row < rows.size() / dim; ++row) {
    const auto head = static_cast<uint32_t>(row % query_heads_ / kGroup);
    UnrotateOutputs(options_.profile->head(layer, heads_.first + head),
                    std::span(rows).subspan(row * dim, dim),
                    std::span(unrotated).subspan(row * dim, dim));
  }
  return unrotated;
}

void GpuScene::ExpectRow(std::span<const float> got,
                         std::span<const float> expected,
                         double tolerance) {
  double error = 0;
  double size = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    error += std::pow(static_cast<double>(got[i]) - static_cast<double>(expected[i]), 2);
    size += std::pow(static_cast<double>(expected[i]), 2);
  }
  // Written so that NaN fails.
  ASSERT_TRUE(std::sqrt(error) <= tolerance * std::sqrt(size))
      << "apart by " << std::sqrt(error / size);
}

void GpuScene::ExpectCpus(std::span<const Member> members, const Outputs& outputs) {
  const size_t dim = geometry_.key_dim;
  std::vector<std::vector<float>> got;
  for (uint32_t layer = 0; layer < geometry_.num_layers; ++layer) {
    got.push_back(ToModel(layer, outputs.layers[layer]));
  }
  size_t first = 0;
  for (size_t m = 0; m < members.size(); ++m) {
    const uint32_t length = members[m].live->cpu->length();
    const auto expected = RunCpu(members[m]);
    const double tolerance =
        members[m].num_tokens > 1 ? options_.chunk_tolerance : options_.tolerance;
    for (uint32_t layer = 0; layer < geometry_.num_layers; ++layer) {
      for (size_t row = 0; row < expected[layer].size() / dim; ++row) {
        SCOPED_TRACE(testing::Message()
                     << "member " << m << ", layer " << layer << ", token "
                     << length + row / query_heads_ << ", query head " << row % query_heads_);
        ASSERT_NO_FATAL_FAILURE(ExpectRow(std::span(got[layer]).subspan(first + row * dim, dim),
                                          std::span(expected[layer]).subspan(row * dim, dim),
                                          tolerance));
      }
    }
    first += expected[0].size();
  }
}

namespace {

uint32_t CountTokens(std::span<const GpuScene::Member> members) {
  return std::accumulate(members.begin(), members.end(), 0u,
                         [](uint32_t sum, const auto& member) { return sum + member.num_tokens; });
}

}  // namespace

void GpuScene::Step(std::span<const Member> members, bool reads_prefix_once) {
  Run(members, nullptr, reads_prefix_once);
}

void GpuScene::Replay(std::span<const Member> members, StepGraph* graph) {
  Run(members, graph, /*reads_prefix_once=*/false);
}

void GpuScene::Run(std::span<const Member> members, StepGraph* graph, bool reads_prefix_once) {
  const absl::Status begun =
      Begin(members, graph == nullptr ? 0 : graph->num_rows, reads_prefix_once);
  ASSERT_TRUE(begun.ok()) << begun;
  EnqueueRows(members);
  if (graph == nullptr) {
    EnqueueLayers();
  } else {
    graph->Launch(stream());
  }
  Outputs outputs;
  EnqueueDownload(&outputs, CountTokens(members));
  const absl::Status ended = batch_->EndStep(stream());
  ASSERT_TRUE(ended.ok()) << ended;
  Wait();
  host_rows_.clear();
  ASSERT_TRUE(batch_->Validate().ok()) << batch_->Validate();
  ExpectCpus(members, outputs);
}

std::vector<std::byte> GpuScene::Download(const std::byte* device, size_t bytes) const {
  std::vector<std::byte> host(bytes);
  ExpectOk(CopyFromGpu(host, device, stream()));
  Wait();
  return host;
}

void GpuScene::ExpectSamePages(const Live& live) {
  ASSERT_EQ(live.gpu->length(), live.cpu->length());
  for (uint32_t page = 0; page <= live.gpu->length() / kPageTokens; ++page) {
    for (const PageEncoding encoding : {PageEncoding::kInt2, PageEncoding::kBf16}) {
      SCOPED_TRACE(testing::Message()
                   << "page " << page << " in encoding " << static_cast<int>(encoding));
      const std::byte* const device = live.gpu->Page(PageIdx(page), encoding);
      ASSERT_EQ(device != nullptr, live.cpu->HasPage(PageIdx(page), encoding));
      if (device == nullptr) {
        continue;
      }
      std::vector<std::byte> expected(geometry_.PageBytes(encoding));
      ExpectOk(live.cpu->ExportPage(PageIdx(page), encoding, expected));
      ASSERT_TRUE(Download(device, expected.size()) == expected);
    }
  }
  const Sequence::Footprint a = live.gpu->footprint();
  const Sequence::Footprint b = live.cpu->footprint();
  EXPECT_EQ(a.own_int2_bytes, b.own_int2_bytes);
  EXPECT_EQ(a.own_bf16_bytes, b.own_bf16_bytes);
  EXPECT_EQ(a.shared_int2_bytes, b.shared_int2_bytes);
  EXPECT_EQ(a.shared_bf16_bytes, b.shared_bf16_bytes);
  EXPECT_EQ(a.bf16_equivalent_bytes, b.bf16_equivalent_bytes);
}

}  // namespace crumb
