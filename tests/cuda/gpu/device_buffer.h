// SPDX-License-Identifier: Apache-2.0
//
// Device memory for tests, and streams and graphs that end with their scope.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <vector>

#include "gtest/gtest.h"

namespace crumb {

// EXPECTs, so that a helper which is not void can use it.
#define CRUMB_EXPECT_CUDA(expression)                                                              \
  do {                                                                                             \
    const cudaError_t crumb_error = (expression);                                                  \
    EXPECT_EQ(crumb_error, cudaSuccess) << #expression << ": " << cudaGetErrorString(crumb_error); \
  } while (false)

template <typename T>
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  // Filled with 0xff: NaN as any float.
  explicit DeviceBuffer(size_t count) : count_(count) {
    if (count > 0) {
      CRUMB_EXPECT_CUDA(cudaMalloc(&data_, count * sizeof(T)));
      CRUMB_EXPECT_CUDA(cudaMemset(data_, 0xff, count * sizeof(T)));
    }
  }
  explicit DeviceBuffer(const std::vector<T>& values) : DeviceBuffer(values.size()) {
    Upload(values);
  }
  ~DeviceBuffer() { cudaFree(data_); }
  DeviceBuffer(DeviceBuffer&& other) noexcept : data_(other.data_), count_(other.count_) {
    other.data_ = nullptr;
  }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  T* data() const { return data_; }
  size_t size() const { return count_; }

  void Upload(const std::vector<T>& values) {
    if (!values.empty()) {
      CRUMB_EXPECT_CUDA(
          cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    }
  }
  std::vector<T> Download() const {
    std::vector<T> values(count_);
    if (count_ > 0) {
      CRUMB_EXPECT_CUDA(
          cudaMemcpy(values.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost));
    }
    return values;
  }
  void Fill(int byte) { CRUMB_EXPECT_CUDA(cudaMemset(data_, byte, count_ * sizeof(T))); }

 private:
  T* data_ = nullptr;
  size_t count_ = 0;
};

class TestStream {
 public:
  TestStream() { CRUMB_EXPECT_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~TestStream() { cudaStreamDestroy(stream_); }
  TestStream(const TestStream&) = delete;
  TestStream& operator=(const TestStream&) = delete;

  cudaStream_t get() const { return stream_; }
  void Wait() const { CRUMB_EXPECT_CUDA(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
};

}  // namespace crumb
