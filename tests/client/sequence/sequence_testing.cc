// SPDX-License-Identifier: Apache-2.0
#include "tests/client/sequence/sequence_testing.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <utility>

#include "crumb/cuda/demote.h"
#include "crumb/cuda/rotate.h"
#include "proto/base/check.h"
#include "proto/base/float16.h"
#include "proto/base/status_macros.h"

namespace crumb {
namespace {

float HalfAt(std::span<const std::byte> block, size_t byte) {
  Float16 half;
  std::memcpy(&half, block.data() + byte, sizeof(half));
  return half.ToFloat();
}

double Dequantise(std::span<const std::byte> block, CodePosition code, size_t meta_byte) {
  const auto bits = static_cast<uint32_t>(block[code.byte]) >> code.shift & 3;
  return static_cast<double>(bits) * static_cast<double>(HalfAt(block, meta_byte)) +
         static_cast<double>(HalfAt(block, meta_byte + 2));
}

}  // namespace

Activations::Activations(const Profile& profile,
                         uint32_t num_query_heads,
                         uint32_t num_tokens,
                         uint32_t seed)
    : num_tokens_(num_tokens) {
  const Geometry& geometry = profile.geometry();
  keys_.width = size_t{geometry.num_kv_heads} * geometry.key_dim;
  values_.width = size_t{geometry.num_kv_heads} * geometry.value_dim;
  queries_.width = size_t{num_query_heads} * geometry.key_dim;
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (Rows* rows : {&keys_, &values_, &queries_}) {
    for (uint32_t layer = 0; layer < geometry.num_layers; ++layer) {
      std::vector<float>& values = rows->layers.emplace_back(num_tokens * rows->width);
      std::generate(values.begin(), values.end(), [&] { return normal(random); });
    }
  }
}

std::vector<float> Activations::Cut(const Rows& rows,
                                    uint32_t layer,
                                    uint32_t first,
                                    uint32_t count) {
  const float* begin = rows.layers[layer].data() + first * rows.width;
  return {begin, begin + count * rows.width};
}
std::vector<float> Activations::Keys(uint32_t layer, uint32_t first, uint32_t count) const {
  return Cut(keys_, layer, first, count);
}
std::vector<float> Activations::Values(uint32_t layer, uint32_t first, uint32_t count) const {
  return Cut(values_, layer, first, count);
}
std::vector<float> Activations::Queries(uint32_t layer, uint32_t first, uint32_t count) const {
  return Cut(queries_, layer, first, count);
}

absl::Status RunChunk(Sequence* sequence,
                      const Activations& activations,
                      uint32_t num_tokens,
                      std::vector<std::vector<float>>* out) {
  const uint32_t first = sequence->length();
  const Geometry& geometry = sequence->profile().geometry();
  CRUMB_RETURN_IF_ERROR(sequence->BeginChunk(num_tokens));
  if (out != nullptr) {
    out->assign(geometry.num_layers, {});
  }
  for (uint32_t layer = 0; layer < geometry.num_layers; ++layer) {
    absl::Status status = sequence->Append(layer, activations.Keys(layer, first, num_tokens),
                                           activations.Values(layer, first, num_tokens));
    if (status.ok() && out != nullptr) {
      const std::vector<float> queries = activations.Queries(layer, first, num_tokens);
      (*out)[layer].resize(queries.size() / geometry.key_dim * geometry.value_dim);
      status = sequence->Attend(layer, queries, (*out)[layer]);
    }
    if (!status.ok()) {
      sequence->AbandonChunk();
      return status;
    }
  }
  return sequence->EndChunk();
}

NaiveSequence::NaiveSequence(std::shared_ptr<const Profile> profile,
                             uint32_t num_query_heads,
                             bool all_bf16)
    : profile_(std::move(profile)),
      num_query_heads_(num_query_heads),
      all_bf16_(all_bf16),
      heads_(profile_->geometry().num_layers,
             std::vector<Head>(profile_->geometry().num_kv_heads)) {}

void NaiveSequence::AppendHead(uint32_t layer,
                               uint32_t kv_head,
                               std::span<const float> keys,
                               std::span<const float> values,
                               uint32_t num_tokens) {
  const Geometry& geometry = profile_->geometry();
  const HeadParameters& parameters = profile_->head(layer, kv_head);
  std::vector<BFloat16> row(std::max(geometry.key_dim, geometry.value_dim));
  Head& head = heads_[layer][kv_head];
  for (uint32_t token = 0; token < num_tokens; ++token) {
    const size_t slot = size_t{token} * geometry.num_kv_heads + kv_head;
    RotateKeys(parameters, keys.subspan(slot * geometry.key_dim, geometry.key_dim),
               {row.data(), geometry.key_dim});
    for (uint32_t channel = 0; channel < geometry.key_dim; ++channel) {
      head.keys.push_back(static_cast<double>(row[channel].ToFloat()));
    }
    RotateValues(parameters, values.subspan(slot * geometry.value_dim, geometry.value_dim),
                 {row.data(), geometry.value_dim});
    for (uint32_t channel = 0; channel < geometry.value_dim; ++channel) {
      head.values.push_back(static_cast<double>(row[channel].ToFloat()));
    }
  }
}

void NaiveSequence::DemoteWholePages(uint32_t layer, uint32_t kv_head) {
  const Geometry& geometry = profile_->geometry();
  const Int2HeadBlock format = geometry.Int2Block();
  Head& head = heads_[layer][kv_head];
  const auto to_bf16 = [](const std::vector<double>& rows, size_t first, size_t count) {
    std::vector<BFloat16> out(count);
    for (size_t i = 0; i < count; ++i) {
      out[i] = BFloat16::FromFloat(static_cast<float>(rows[first + i]));
    }
    return out;
  };
  const size_t key_count = size_t{kPageTokens} * geometry.key_dim;
  const size_t value_count = size_t{kPageTokens} * geometry.value_dim;
  for (size_t page = head.keys_int2.size() / key_count; (page + 1) * key_count <= head.keys.size();
       ++page) {
    std::vector<std::byte> block(format.bytes());
    const absl::Status status = DemoteHeadBlock(
        profile_->head(layer, kv_head), to_bf16(head.keys, page * key_count, key_count),
        to_bf16(head.values, page * value_count, value_count), block);
    CRUMB_CHECK(status.ok(), status.ToString().c_str());
    for (uint32_t token = 0; token < kPageTokens; ++token) {
      for (uint32_t channel = 0; channel < geometry.key_dim; ++channel) {
        head.keys_int2.push_back(
            Dequantise(block, format.KeyCode(token, channel), format.KeyMetaByte(token)));
      }
      for (uint32_t channel = 0; channel < geometry.value_dim; ++channel) {
        head.values_int2.push_back(
            Dequantise(block, format.ValueCode(token, channel), format.ValueMetaByte(token)));
      }
    }
  }
}

std::vector<double> NaiveSequence::AttendOne(uint32_t layer,
                                             uint32_t kv_head,
                                             std::span<const float> query,
                                             uint32_t position,
                                             uint32_t history_end) const {
  const Geometry& geometry = profile_->geometry();
  const HeadParameters& parameters = profile_->head(layer, kv_head);
  const Head& head = heads_[layer][kv_head];
  std::vector<float> rotated(geometry.key_dim);
  RotateQueries(parameters, query, rotated);
  const auto is_history = [&](uint32_t token) {
    return !all_bf16_ && token >= profile_->windows().sink_tokens && token < history_end;
  };
  std::vector<double> scores(position + 1);
  for (uint32_t token = 0; token <= position; ++token) {
    const auto& rows = is_history(token) ? head.keys_int2 : head.keys;
    for (uint32_t i = 0; i < geometry.key_dim; ++i) {
      scores[token] += rows[size_t{token} * geometry.key_dim + i] * static_cast<double>(rotated[i]);
    }
    scores[token] /= std::sqrt(static_cast<double>(geometry.key_dim));
  }
  const double top = *std::max_element(scores.begin(), scores.end());
  double total = 0;
  std::vector<double> sum(geometry.value_dim);
  for (uint32_t token = 0; token <= position; ++token) {
    const double weight = std::exp(scores[token] - top);
    const auto& rows = is_history(token) ? head.values_int2 : head.values;
    total += weight;
    for (uint32_t i = 0; i < geometry.value_dim; ++i) {
      sum[i] += weight * rows[size_t{token} * geometry.value_dim + i];
    }
  }
  std::vector<double> out(geometry.value_dim);
  for (uint32_t i = 0; i < geometry.value_dim; ++i) {  // Row times the transposed rotation.
    for (uint32_t j = 0; j < geometry.value_dim; ++j) {
      out[i] += sum[j] / total *
                static_cast<double>(parameters.value_rotation[size_t{i} * geometry.value_dim + j]);
    }
  }
  return out;
}

std::vector<std::vector<double>> NaiveSequence::RunChunk(const Activations& activations,
                                                         uint32_t num_tokens) {
  const Geometry& geometry = profile_->geometry();
  const uint32_t recent = profile_->windows().recent_tokens;
  // Written as the study writes it, for the chunk's first query.
  const uint32_t seen = length_ + 1 > recent ? length_ + 1 - recent : 0;
  const uint32_t history_end = std::min(seen, length_) / kPageTokens * kPageTokens;
  const uint32_t group = num_query_heads_ / geometry.num_kv_heads;
  std::vector<std::vector<double>> out(geometry.num_layers);
  for (uint32_t layer = 0; layer < geometry.num_layers; ++layer) {
    const auto keys = activations.Keys(layer, length_, num_tokens);
    const auto values = activations.Values(layer, length_, num_tokens);
    const auto queries = activations.Queries(layer, length_, num_tokens);
    for (uint32_t kv_head = 0; kv_head < geometry.num_kv_heads; ++kv_head) {
      AppendHead(layer, kv_head, keys, values, num_tokens);
      DemoteWholePages(layer, kv_head);
    }
    for (uint32_t token = 0; token < num_tokens; ++token) {
      for (uint32_t query_head = 0; query_head < num_query_heads_; ++query_head) {
        const std::span<const float> query(
            queries.data() + (size_t{token} * num_query_heads_ + query_head) * geometry.key_dim,
            geometry.key_dim);
        const auto row = AttendOne(layer, query_head / group, query, length_ + token, history_end);
        out[layer].insert(out[layer].end(), row.begin(), row.end());
      }
    }
  }
  length_ += num_tokens;
  return out;
}

FakePrefix::FakePrefix(std::shared_ptr<const Profile> profile, uint32_t num_pages)
    : profile_(std::move(profile)), num_pages_(num_pages), int2_(num_pages), bf16_(num_pages) {}

std::shared_ptr<FakePrefix> FakePrefix::Of(const Sequence& sequence,
                                           std::shared_ptr<const Profile> profile,
                                           uint32_t num_pages) {
  auto prefix = std::make_shared<FakePrefix>(profile, num_pages);
  for (uint32_t page = 0; page < num_pages; ++page) {
    for (const PageEncoding encoding : {PageEncoding::kInt2, PageEncoding::kBf16}) {
      if (sequence.HasPage(PageIdx(page), encoding)) {
        std::vector<std::byte> image(profile->geometry().PageBytes(encoding));
        const absl::Status status = sequence.ExportPage(PageIdx(page), encoding, image);
        CRUMB_CHECK(status.ok(), status.ToString().c_str());
        prefix->Put(PageIdx(page), encoding, std::move(image));
      }
    }
  }
  return prefix;
}

void FakePrefix::Put(PageIdx page, PageEncoding encoding, std::vector<std::byte> bytes) {
  image(page, encoding) = std::move(bytes);
}

const std::byte* FakePrefix::HeadBlock(PageIdx page,
                                       PageEncoding encoding,
                                       uint32_t layer,
                                       uint32_t kv_head) const {
  const auto& bytes = encoding == PageEncoding::kInt2 ? int2_[page.value()] : bf16_[page.value()];
  return bytes.empty()
             ? nullptr
             : bytes.data() + profile_->geometry().HeadBlockOffset(encoding, layer, kv_head);
}

absl::Status FakePrefix::WaitForLayer(uint32_t layer) {
  layers_waited_for.push_back(layer);
  return wait_status;
}

absl::Status FakePrefix::Validate() {
  return valid;
}

}  // namespace crumb
