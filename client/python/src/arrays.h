// SPDX-License-Identifier: Apache-2.0
//
// Arrays of NumPy and PyTorch as the codec's spans, without a copy. All have the shape
// [heads, rows, columns] (or a part of it): what lies in one head must be dense, heads may be
// apart, so that a slice of the rows needs no copy.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "proto/base/bfloat16.h"

namespace crumb::python {

using Input = nanobind::ndarray<nanobind::ro, nanobind::device::cpu>;
using Output = nanobind::ndarray<nanobind::device::cpu>;

enum class Element : uint8_t { kFloat32, kBfloat16, kUint8 };

// A checked view of one array; alive as long as the array is.
class HeadArray {
 public:
  // What the caller expects. `heads`, `rows`, `columns` of kAny take what comes.
  static constexpr size_t kAny = static_cast<size_t>(-1);
  struct Expected {
    const char* name = "";  // As the caller of the Python function knows it.
    size_t heads = kAny;
    size_t rows = kAny;
    size_t columns = kAny;
  };

  // Throw StatusError (INVALID_ARGUMENT, names the array, what it is and what was expected):
  // another type of element, another shape, rows of a head that are not dense. uint16 counts as
  // bfloat16.
  static HeadArray FloatOrBfloat16(const Input& array, const Expected& expected);
  static HeadArray Of(Element element, const Input& array, const Expected& expected);
  static HeadArray Of(Element element, const Output& array, const Expected& expected);

  Element element() const { return element_; }
  size_t heads() const { return heads_; }
  size_t rows() const { return rows_; }
  size_t columns() const { return columns_; }

  // head < heads(). The element must be the array's.
  std::span<const float> Floats(size_t head) const { return {At<const float>(head), count()}; }
  std::span<const BFloat16> Bfloats(size_t head) const {
    return {At<const BFloat16>(head), count()};
  }
  std::span<const std::byte> Bytes(size_t head) const {
    return {At<const std::byte>(head), count()};
  }
  std::span<float> MutableFloats(size_t head) const { return {At<float>(head), count()}; }
  std::span<BFloat16> MutableBfloats(size_t head) const { return {At<BFloat16>(head), count()}; }
  std::span<std::byte> MutableBytes(size_t head) const { return {At<std::byte>(head), count()}; }

  // The head's elements as floats: its own, or those of `scratch`, which is filled.
  std::span<const float> AsFloats(size_t head, std::vector<float>* scratch) const;

 private:
  HeadArray() = default;
  template <typename Array>
  static HeadArray Check(const Array& array, const Expected& expected);

  size_t count() const { return rows_ * columns_; }
  template <typename T>
  T* At(size_t head) const {
    return reinterpret_cast<T*>(data_ + head * head_bytes_);
  }

  Element element_ = Element::kFloat32;
  size_t heads_ = 0;
  size_t rows_ = 0;
  size_t columns_ = 0;
  std::byte* data_ = nullptr;  // Written through only when made of an Output.
  size_t head_bytes_ = 0;
};

}  // namespace crumb::python
