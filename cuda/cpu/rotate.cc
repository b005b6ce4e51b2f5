// SPDX-License-Identifier: Apache-2.0
#include "crumb/cuda/rotate.h"

#include <array>

#include "cuda/cpu/rotate_kernel.h"
#include "cuda/reference/rotate.h"
#include "proto/base/check.h"

namespace crumb {
namespace {

const cpu::RotateFunctions& FunctionsOf(CpuPath path) {
#if defined(__x86_64__)
  if (path == CpuPath::kAvx512) {
    return cpu::Avx512RotateFunctions();
  }
  if (path == CpuPath::kAvx2) {
    return cpu::Avx2RotateFunctions();
  }
#endif
  CRUMB_CHECK(path == CpuPath::kPortable, "this path is not in the build");
  return cpu::PortableRotateFunctions();
}

cpu::RotateArgs ArgsOf(std::span<const float> rows,
                       size_t out_size,
                       uint32_t dim,
                       const float* mean,
                       const float* rotation) {
  CRUMB_CHECK(rows.size() % dim == 0, "not a whole number of rows");
  CRUMB_CHECK(out_size == rows.size(), "in and out differ in length");
  return {.rows = rows.data(),
          .num_rows = rows.size() / dim,
          .dim = dim,
          .mean = mean,
          .rotation = rotation};
}

void ReferenceRow(const cpu::RotateArgs& args, size_t row, std::span<float> out) {
  reference::RotateRow(
      {args.rows + row * args.dim, args.dim},
      args.mean == nullptr ? std::span<const float>() : std::span(args.mean, args.dim),
      {args.rotation, args.dim * args.dim}, out);
}

void RotateToBf16(const cpu::RotateArgs& args, BFloat16* out, CpuPath path) {
  if (path != CpuPath::kReference) {
    FunctionsOf(path).rotate_to_bf16(args, out);
    return;
  }
  std::array<float, kMaxHeadDim> rotated{};
  for (size_t row = 0; row < args.num_rows; ++row) {
    ReferenceRow(args, row, std::span(rotated).first(args.dim));
    for (size_t k = 0; k < args.dim; ++k) {
      out[row * args.dim + k] = BFloat16::FromFloat(rotated[k]);
    }
  }
}

}  // namespace

void RotateKeys(const HeadParameters& head,
                std::span<const float> rows,
                std::span<BFloat16> out,
                CpuPath path) {
  RotateToBf16(ArgsOf(rows, out.size(), head.key_dim, head.key_mean, head.key_rotation), out.data(),
               path);
}

void RotateValues(const HeadParameters& head,
                  std::span<const float> rows,
                  std::span<BFloat16> out,
                  CpuPath path) {
  RotateToBf16(ArgsOf(rows, out.size(), head.value_dim, nullptr, head.value_rotation), out.data(),
               path);
}

void RotateQueries(const HeadParameters& head,
                   std::span<const float> rows,
                   std::span<float> out,
                   CpuPath path) {
  const float* rotation = head.query_rotation != nullptr ? head.query_rotation : head.key_rotation;
  const auto args = ArgsOf(rows, out.size(), head.key_dim, nullptr, rotation);
  if (path != CpuPath::kReference) {
    FunctionsOf(path).rotate_to_float(args, out.data());
    return;
  }
  for (size_t row = 0; row < args.num_rows; ++row) {
    ReferenceRow(args, row, out.subspan(row * args.dim, args.dim));
  }
}

void UnrotateOutputs(const HeadParameters& head,
                     std::span<const float> rows,
                     std::span<float> out,
                     CpuPath path) {
  const auto args = ArgsOf(rows, out.size(), head.value_dim, nullptr, head.value_rotation);
  if (path != CpuPath::kReference) {
    FunctionsOf(path).rotate_back(args, out.data());
    return;
  }
  const size_t dim = args.dim;
  for (size_t row = 0; row < args.num_rows; ++row) {
    reference::RotateRowBack(rows.subspan(row * dim, dim), {args.rotation, dim * dim},
                             out.subspan(row * dim, dim));
  }
}

}  // namespace crumb
