// SPDX-License-Identifier: Apache-2.0
//
// Demotion of a PageScene's rows on the device, and by the twin. For tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

#include "crumb/cuda/demote_pages.h"
#include "tests/cuda/gpu/device_buffer.h"
#include "tests/cuda/gpu/gpu_fixture.h"
#include "tests/cuda/gpu/page_scene.h"

namespace crumb {

// A scene's rows and pages on the device.
class DevicePages {
 public:
  DevicePages(const PageScene& scene, const std::vector<BFloat16>& rows)
      : scene_(scene),
        bf16_(rows),
        int2_(scene.num_pages() * scene.int2_bytes()),
        bf16_table_(
            scene.Table(reinterpret_cast<const std::byte*>(bf16_.data()), scene.bf16_bytes())),
        int2_table_(scene.Table(int2_.data(), scene.int2_bytes())),
        finding_(std::vector<uint64_t>{0}) {
    auto profile = DeviceProfile::Create(scene.geometry(), scene.heads());
    EXPECT_TRUE(profile.ok()) << profile.status();
    profile_ = *std::move(profile);
    params_ = scene.Demotion(bf16_table_.data(), int2_table_.data());
    params_.heads = profile_->heads();
    params_.finding = finding_.data();
  }

  DemotePagesParams& params() { return params_; }
  DeviceBuffer<BFloat16>& bf16() { return bf16_; }

  std::vector<std::byte> Run() {
    int2_.Fill(0xee);
    const absl::Status status = DemotePages(params_, nullptr);
    EXPECT_TRUE(status.ok()) << status;
    CRUMB_EXPECT_CUDA(cudaDeviceSynchronize());
    return int2_.Download();
  }

 private:
  const PageScene& scene_;
  DeviceBuffer<BFloat16> bf16_;
  DeviceBuffer<std::byte> int2_;
  DeviceBuffer<const std::byte*> bf16_table_;
  DeviceBuffer<std::byte*> int2_table_;
  DeviceBuffer<uint64_t> finding_;
  std::unique_ptr<DeviceProfile> profile_;
  DemotePagesParams params_;
};

// The pages that the twin makes of rows.
inline std::vector<std::byte> Reference(const PageScene& scene,
                                        const std::vector<BFloat16>& rows,
                                        bool rows_are_rotated) {
  std::vector<std::byte> int2(scene.num_pages() * scene.int2_bytes(), std::byte{0xee});
  const auto from =
      scene.Table(reinterpret_cast<const std::byte*>(rows.data()), scene.bf16_bytes());
  const auto to = scene.Table(int2.data(), scene.int2_bytes());
  DemotePagesParams params = scene.Demotion(from.data(), to.data());
  params.rows_are_rotated = rows_are_rotated;
  const absl::Status status = DemotePagesReference(params, scene.heads());
  EXPECT_TRUE(status.ok()) << status;
  return int2;
}

inline size_t CountDifferentBytes(const std::vector<std::byte>& a,
                                  const std::vector<std::byte>& b) {
  size_t count = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    count += a[i] != b[i] ? 1u : 0u;
  }
  return count;
}

}  // namespace crumb
