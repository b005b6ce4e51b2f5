// SPDX-License-Identifier: Apache-2.0
//
// Each op over a small scene of its own in device memory, all by one interface: for what is true of
// every op, whatever it computes.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

#include "crumb/cuda/checksum_pages.h"
#include "crumb/cuda/demote_pages.h"
#include "crumb/cuda/expand_pages.h"
#include "crumb/cuda/prefill_attention.h"
#include "crumb/cuda/shared_decode.h"
#include "crumb/cuda/split_decode.h"
#include "tests/cuda/gpu/append_scene.h"
#include "tests/cuda/gpu/device_buffer.h"
#include "tests/cuda/gpu/device_scene.h"
#include "tests/cuda/gpu/expand_scene.h"
#include "tests/cuda/gpu/prefill_scene.h"

namespace crumb {

class OpUnderTest {
 public:
  explicit OpUnderTest(std::string name) : name_(std::move(name)) {}
  virtual ~OpUnderTest() = default;
  OpUnderTest(const OpUnderTest&) = delete;
  OpUnderTest& operator=(const OpUnderTest&) = delete;

  const std::string& name() const { return name_; }
  virtual absl::Status Launch(GpuStream stream) = 0;
  // Spoils what a launch writes.
  virtual void Clear() = 0;
  virtual std::vector<std::byte> Outputs() const = 0;

 protected:
  template <typename T>
  static void Append(const DeviceBuffer<T>& from, std::vector<std::byte>* to) {
    const std::vector<T> values = from.Download();
    const auto* const bytes = reinterpret_cast<const std::byte*>(values.data());
    to->insert(to->end(), bytes, bytes + values.size() * sizeof(T));
  }

 private:
  const std::string name_;
};

// Split decode, or with a prefix that is sequence 0's history shared decode.
class DecodeUnderTest : public OpUnderTest {
 public:
  DecodeUnderTest(uint32_t dim, bool is_shared)
      : OpUnderTest(absl::StrCat(is_shared ? "shared_decode " : "split_decode ", dim)),
        is_shared_(is_shared),
        scene_({.head_dim = dim,
                .num_kv_heads = 2,
                .group = 4,
                .lengths = {{5, 70}, {0, 9}, {17, 130}}}),
        device_(scene_),
        prefix_pages_(std::vector<uint32_t>{5}) {
    shared_.batch = device_.params();
    shared_.prefix = device_.params().history;
    shared_.prefix_pages = prefix_pages_.data();
    if (is_shared) {
      workspace_ = DeviceBuffer<std::byte>(SharedDecodeWorkspaceBytes(shared_).value_or(0));
      workspace_.Fill(0);
      shared_.batch.workspace = workspace_.data();
      shared_.batch.workspace_bytes = workspace_.size();
    }
  }
  absl::Status Launch(GpuStream stream) override {
    return is_shared_ ? SharedDecode(shared_, stream) : SplitDecode(device_.params(), stream);
  }
  void Clear() override { device_.SpoilOutputs(); }
  std::vector<std::byte> Outputs() const override {
    const DecodeScene::Result result = device_.Download();
    const auto* const bytes = reinterpret_cast<const std::byte*>(result.out.data());
    return {bytes, bytes + result.out.size() * sizeof(float)};
  }

 private:
  const bool is_shared_;
  const DecodeScene scene_;
  DeviceScene device_;
  DeviceBuffer<uint32_t> prefix_pages_;
  SharedDecodeParams shared_;
  DeviceBuffer<std::byte> workspace_;
};

class PrefillUnderTest : public OpUnderTest {
 public:
  explicit PrefillUnderTest(uint32_t dim)
      : OpUnderTest(absl::StrCat("prefill_attention ", dim)),
        scene_({.dim = dim, .history_pages = 3, .window_tokens = 150, .num_queries = 70}),
        int2_(scene_.int2()),
        windows_(scene_.windows()),
        queries_(scene_.queries()),
        history_table_(scene_.HistoryTable(int2_.data())),
        window_table_(scene_.WindowTable(windows_.data())),
        out_(scene_.num_rows() * dim),
        lse_(scene_.num_rows()),
        params_(scene_.Params(queries_.data(),
                              history_table_.data(),
                              window_table_.data(),
                              out_.data(),
                              lse_.data())) {}
  absl::Status Launch(GpuStream stream) override { return PrefillAttention(params_, stream); }
  void Clear() override {
    out_.Fill(0xff);
    lse_.Fill(0xff);
  }
  std::vector<std::byte> Outputs() const override {
    std::vector<std::byte> outputs;
    Append(out_, &outputs);
    Append(lse_, &outputs);
    return outputs;
  }

 private:
  const PrefillScene scene_;
  DeviceBuffer<std::byte> int2_;
  DeviceBuffer<BFloat16> windows_;
  DeviceBuffer<uint16_t> queries_;
  DeviceBuffer<const std::byte*> history_table_;
  DeviceBuffer<const std::byte*> window_table_;
  DeviceBuffer<float> out_;
  DeviceBuffer<float> lse_;
  const PrefillAttentionParams params_;
};

class AppendUnderTest : public OpUnderTest {
 public:
  AppendUnderTest(uint32_t dim, ElementType type)
      : OpUnderTest(absl::StrCat("append_rows ", dim, " of type ", static_cast<int>(type))),
        scene_({.dim = dim, .num_tokens = 9, .type = type}),
        windows_(scene_.pages().num_pages() * scene_.pages().bf16_bytes()),
        table_(scene_.pages().Table(windows_.data(), scene_.pages().bf16_bytes())),
        rows_(scene_.rows()),
        queries_(scene_.query_elements()),
        sequences_(scene_.sequences()),
        slots_(scene_.slots()),
        left_out_(std::vector<uint64_t>{0}),
        profile_(*DeviceProfile::Create(scene_.pages().geometry(), scene_.pages().heads())),
        params_(scene_.Params(
            1, rows_.data(), queries_.data(), table_.data(), sequences_.data(), slots_.data())) {
    params_.heads = profile_->heads();
    params_.tokens_left_out = left_out_.data();
  }
  absl::Status Launch(GpuStream stream) override { return AppendRows(params_, stream); }
  void Clear() override {
    windows_.Fill(0xff);
    queries_.Fill(0xff);
  }
  std::vector<std::byte> Outputs() const override {
    std::vector<std::byte> outputs;
    Append(windows_, &outputs);
    Append(queries_, &outputs);
    return outputs;
  }

 private:
  AppendScene scene_;
  DeviceBuffer<std::byte> windows_;
  DeviceBuffer<std::byte*> table_;
  DeviceBuffer<uint16_t> rows_;
  DeviceBuffer<uint16_t> queries_;
  DeviceBuffer<uint32_t> sequences_;
  DeviceBuffer<uint32_t> slots_;
  DeviceBuffer<uint64_t> left_out_;
  const std::unique_ptr<DeviceProfile> profile_;
  AppendRowsParams params_;
};

class DemoteUnderTest : public OpUnderTest {
 public:
  DemoteUnderTest(uint32_t dim, CodecId codec, bool is_rotated)
      : OpUnderTest(absl::StrCat(is_rotated ? "demote_rotated " : "demote ",
                                 dim,
                                 " by codec ",
                                 static_cast<int>(codec))),
        scene_({2, 2, dim, dim}, codec, 3),
        rows_(scene_.RandomRows(5)),
        int2_(scene_.num_pages() * scene_.int2_bytes()),
        row_table_(
            scene_.Table(reinterpret_cast<const std::byte*>(rows_.data()), scene_.bf16_bytes())),
        int2_table_(scene_.Table(int2_.data(), scene_.int2_bytes())),
        finding_(std::vector<uint64_t>{0}),
        profile_(*DeviceProfile::Create(scene_.geometry(), scene_.heads())),
        params_(scene_.Demotion(row_table_.data(), int2_table_.data())) {
    params_.heads = profile_->heads();
    params_.rows_are_rotated = is_rotated;
    params_.finding = finding_.data();
  }
  absl::Status Launch(GpuStream stream) override { return DemotePages(params_, stream); }
  void Clear() override { int2_.Fill(0xff); }
  std::vector<std::byte> Outputs() const override { return int2_.Download(); }

 private:
  const PageScene scene_;
  DeviceBuffer<BFloat16> rows_;
  DeviceBuffer<std::byte> int2_;
  DeviceBuffer<const std::byte*> row_table_;
  DeviceBuffer<std::byte*> int2_table_;
  DeviceBuffer<uint64_t> finding_;
  const std::unique_ptr<DeviceProfile> profile_;
  DemotePagesParams params_;
};

class ExpandUnderTest : public OpUnderTest {
 public:
  ExpandUnderTest(uint32_t dim, ExpandSpace space)
      : OpUnderTest(absl::StrCat("expand ", dim, " to space ", static_cast<int>(space))),
        scene_({2, 2, dim, dim}, CodecId::kOscarInt2Aware, 3),
        cache_(scene_, {CacheOrder::kHnd, 16, 5, 2 * kPageTokens + 9}),
        int2_(RandomInt2Pages(scene_, dim)),
        rows_(cache_.bytes()),
        pages_(scene_.Table(static_cast<const std::byte*>(int2_.data()), scene_.int2_bytes())),
        layers_(cache_.Layers(rows_.data())),
        table_(cache_.table()),
        left_out_(std::vector<uint64_t>{0}),
        profile_(*DeviceProfile::Create(scene_.geometry(), scene_.heads())),
        params_(cache_.Params(pages_.data(), layers_.data(), table_.data(), space)) {
    params_.heads = profile_->heads();
    params_.rows_left_out = left_out_.data();
  }
  absl::Status Launch(GpuStream stream) override { return ExpandPages(params_, stream); }
  void Clear() override { rows_.Fill(0xff); }
  std::vector<std::byte> Outputs() const override { return rows_.Download(); }

 private:
  const PageScene scene_;
  EngineCache cache_;
  DeviceBuffer<std::byte> int2_;
  DeviceBuffer<std::byte> rows_;
  DeviceBuffer<const std::byte*> pages_;
  DeviceBuffer<std::byte*> layers_;
  DeviceBuffer<int32_t> table_;
  DeviceBuffer<uint64_t> left_out_;
  const std::unique_ptr<DeviceProfile> profile_;
  ExpandPagesParams params_;
};

class ChecksumUnderTest : public OpUnderTest {
 public:
  ChecksumUnderTest()
      : OpUnderTest("checksum"),
        bytes_(kPages * kRanges * kRangeBytes),
        pages_(Table(bytes_.data())),
        checksums_(kPages * kRanges) {}
  absl::Status Launch(GpuStream stream) override {
    return ChecksumPages({.num_pages = kPages,
                          .num_ranges = kRanges,
                          .pages = pages_.data(),
                          .offset = 0,
                          .range_stride = kRangeBytes,
                          .range_bytes = kRangeBytes,
                          .checksums = checksums_.data()},
                         stream);
  }
  void Clear() override { checksums_.Fill(0xff); }
  std::vector<std::byte> Outputs() const override {
    std::vector<std::byte> outputs;
    Append(checksums_, &outputs);
    return outputs;
  }

 private:
  static constexpr uint32_t kPages = 3;
  static constexpr uint32_t kRanges = 2;
  static constexpr size_t kRangeBytes = 512 * 40;

  static std::vector<const std::byte*> Table(const std::byte* base) {
    std::vector<const std::byte*> table;
    for (uint32_t page = 0; page < kPages; ++page) {
      table.push_back(base + page * kRanges * kRangeBytes);
    }
    return table;
  }

  DeviceBuffer<std::byte> bytes_;
  DeviceBuffer<const std::byte*> pages_;
  DeviceBuffer<uint32_t> checksums_;
};

// Every op in every form that it has kernels of; shared decode where the device has it.
inline std::vector<std::unique_ptr<OpUnderTest>> EveryOp() {
  std::vector<std::unique_ptr<OpUnderTest>> ops;
  const bool is_hopper = CurrentGpu().value_or(GpuDevice{}).major == 9;
  for (const uint32_t dim : {64u, 128u, 256u}) {
    ops.push_back(std::make_unique<DecodeUnderTest>(dim, /*is_shared=*/false));
    if (is_hopper) {
      ops.push_back(std::make_unique<DecodeUnderTest>(dim, /*is_shared=*/true));
    }
    ops.push_back(std::make_unique<PrefillUnderTest>(dim));
    for (const ElementType type : {ElementType::kBf16, ElementType::kFp16}) {
      ops.push_back(std::make_unique<AppendUnderTest>(dim, type));
    }
    for (const CodecId codec : {CodecId::kOscarInt2, CodecId::kOscarInt2Lm,
                                CodecId::kOscarInt2Aware, CodecId::kOscarInt2Tilted}) {
      ops.push_back(std::make_unique<DemoteUnderTest>(dim, codec, /*is_rotated=*/false));
      ops.push_back(std::make_unique<DemoteUnderTest>(dim, codec, /*is_rotated=*/true));
    }
    for (const ExpandSpace space : {ExpandSpace::kRotated, ExpandSpace::kModel}) {
      ops.push_back(std::make_unique<ExpandUnderTest>(dim, space));
    }
  }
  ops.push_back(std::make_unique<ChecksumUnderTest>());
  return ops;
}

}  // namespace crumb
