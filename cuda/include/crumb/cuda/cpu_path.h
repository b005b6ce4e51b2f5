// SPDX-License-Identifier: Apache-2.0
//
// Which implementation of the codec runs on this processor. Every op has a readable twin and fast
// paths; given the same rotated BF16 rows all of them write the same codes and metadata.
#pragma once

#include <string_view>

namespace crumb {

enum class CpuPath {
  kReference,  // The readable twin, in float and double; independent of the others.
  kPortable,   // Plain C++ for processors without the below.
  kAvx2,       // AVX2, FMA, F16C.
  kAvx512,     // AVX-512 F, BW, VL, DQ, VNNI.
};

std::string_view CpuPathName(CpuPath path);

// Whether this processor can run `path`.
bool CpuPathAvailable(CpuPath path);

// The fastest available, found once. CRUMB_CPU_PATH=reference|portable|avx2|avx512 in the
// environment asks for another; one that is not available or not known is ignored.
CpuPath BestCpuPath();

}  // namespace crumb
