// SPDX-License-Identifier: Apache-2.0
#include "client/python/src/arrays.h"

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

#include "client/python/src/status.h"

namespace crumb::python {
namespace {

namespace nb = nanobind;

template <typename... Parts>
[[noreturn]] void Refuse(const char* name, const Parts&... parts) {
  // throws: the edge of Python.
  throw StatusError(absl::InvalidArgumentError(absl::StrCat(name, " ", parts...)));
}

std::string TypeText(nb::dlpack::dtype type) {
  static constexpr const char* kNames[] = {"int", "uint", "float", "opaque", "bfloat", "complex"};
  const char* name = type.code < std::size(kNames) ? kNames[type.code] : "type";
  return absl::StrCat(name, static_cast<int>(type.bits));
}

const char* Name(Element element) {
  switch (element) {
    case Element::kFloat32:
      return "float32";
    case Element::kBfloat16:
      return "bfloat16 (or its bits as uint16)";
    case Element::kUint8:
      return "uint8";
  }
  return "";
}

size_t BytesOf(Element element) {
  return element == Element::kFloat32 ? 4 : element == Element::kBfloat16 ? 2 : 1;
}

// False: none of the three.
bool ElementOf(nb::dlpack::dtype type, Element* element) {
  using Code = nb::dlpack::dtype_code;
  const auto is = [&](Code code, uint8_t bits) {
    return type.code == static_cast<uint8_t>(code) && type.bits == bits && type.lanes == 1;
  };
  if (is(Code::Float, 32)) {
    *element = Element::kFloat32;
  } else if (is(Code::Bfloat, 16) || is(Code::UInt, 16)) {
    *element = Element::kBfloat16;
  } else if (is(Code::UInt, 8)) {
    *element = Element::kUint8;
  } else {
    return false;
  }
  return true;
}

std::string Extent(size_t extent, const char* any) {
  return extent == HeadArray::kAny ? any : absl::StrCat(extent);
}

template <typename Array>
std::string ShapeText(const Array& array) {
  std::string text = "[";
  for (size_t i = 0; i < array.ndim(); ++i) {
    absl::StrAppend(&text, i == 0 ? "" : ", ", array.shape(i));
  }
  return text + "]";
}

}  // namespace

template <typename Array>
HeadArray HeadArray::Check(const Array& array, const Expected& expected) {
  HeadArray view;
  if (!ElementOf(array.dtype(), &view.element_)) {
    Refuse(expected.name, "is of ", TypeText(array.dtype()),
           "; float32, bfloat16 (or its bits as uint16) or, for pages, uint8 is expected");
  }
  const auto fits = [](size_t wanted, size_t extent) { return wanted == kAny || wanted == extent; };
  if (array.ndim() != 3 || !fits(expected.heads, array.shape(0)) ||
      !fits(expected.rows, array.shape(1)) || !fits(expected.columns, array.shape(2))) {
    Refuse(expected.name, "has the shape ", ShapeText(array), "; [",
           Extent(expected.heads, "heads"), ", ", Extent(expected.rows, "rows"), ", ",
           Extent(expected.columns, "columns"), "] is expected");
  }
  view.heads_ = array.shape(0);
  view.rows_ = array.shape(1);
  view.columns_ = array.shape(2);
  // The stride of an axis of one element says nothing, nor do those of an empty array.
  const auto columns = static_cast<int64_t>(view.columns_);
  if (array.size() != 0 &&
      ((view.columns_ > 1 && array.stride(2) != 1) ||
       (view.rows_ > 1 && array.stride(1) != columns) ||
       (view.heads_ > 1 && array.stride(0) < static_cast<int64_t>(view.count())))) {
    Refuse(expected.name, ShapeText(array), " is not dense within a head (strides ",
           array.stride(0), ", ", array.stride(1), ", ", array.stride(2),
           "); make it contiguous, for example by .contiguous() or numpy.ascontiguousarray");
  }
  // Only an Output's bytes are ever written.
  view.data_ = static_cast<std::byte*>(const_cast<void*>(static_cast<const void*>(array.data())));
  view.head_bytes_ =
      view.heads_ > 1 ? static_cast<size_t>(array.stride(0)) * BytesOf(view.element_) : 0;
  return view;
}

HeadArray HeadArray::FloatOrBfloat16(const Input& array, const Expected& expected) {
  const HeadArray view = Check(array, expected);
  if (view.element_ == Element::kUint8) {
    Refuse(expected.name, "is of uint8; float32 or bfloat16 is expected");
  }
  return view;
}

HeadArray HeadArray::Of(Element element, const Input& array, const Expected& expected) {
  const HeadArray view = Check(array, expected);
  if (view.element_ != element) {
    Refuse(expected.name, "is of ", Name(view.element_), "; ", Name(element), " is expected");
  }
  return view;
}

HeadArray HeadArray::Of(Element element, const Output& array, const Expected& expected) {
  const HeadArray view = Check(array, expected);
  if (view.element_ != element) {
    Refuse(expected.name, "is of ", Name(view.element_), "; ", Name(element), " is expected");
  }
  return view;
}

std::span<const float> HeadArray::AsFloats(size_t head, std::vector<float>* scratch) const {
  if (element_ == Element::kFloat32) {
    return Floats(head);
  }
  const std::span<const BFloat16> rows = Bfloats(head);
  scratch->resize(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    (*scratch)[i] = rows[i].ToFloat();
  }
  return *scratch;
}

}  // namespace crumb::python
