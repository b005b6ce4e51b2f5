// SPDX-License-Identifier: Apache-2.0
#include "crumb/cuda/cpu_path.h"

#include <cstdlib>
#include <optional>

#include "proto/base/check.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace crumb {
namespace {

constexpr CpuPath kFastestFirst[] = {CpuPath::kAvx512, CpuPath::kAvx2, CpuPath::kPortable,
                                     CpuPath::kReference};

#if defined(__x86_64__)

// By hand: not every compiler of ours knows the name for __builtin_cpu_supports.
bool HasF16c() {
  unsigned int eax = 0;
  unsigned int ebx = 0;
  unsigned int ecx = 0;
  unsigned int edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

// __builtin_cpu_supports also asks whether the operating system saves the wide registers.
bool HasAvx2() {
  return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0 && HasF16c();
}

bool HasAvx512() {
  return HasAvx2() && __builtin_cpu_supports("avx512f") != 0 &&
         __builtin_cpu_supports("avx512bw") != 0 && __builtin_cpu_supports("avx512vl") != 0 &&
         __builtin_cpu_supports("avx512dq") != 0 && __builtin_cpu_supports("avx512vnni") != 0;
}

#else

bool HasAvx2() {
  return false;
}
bool HasAvx512() {
  return false;
}

#endif

std::optional<CpuPath> PathFromEnvironment() {
  // Read once, under the lock of a function's static.
  const char* wish = std::getenv("CRUMB_CPU_PATH");  // NOLINT(concurrency-mt-unsafe)
  if (wish == nullptr) {
    return std::nullopt;
  }
  for (const CpuPath path : kFastestFirst) {
    if (CpuPathName(path) == wish && CpuPathAvailable(path)) {
      return path;
    }
  }
  return std::nullopt;
}

CpuPath FindBest() {
  if (const auto wish = PathFromEnvironment()) {
    return *wish;
  }
  for (const CpuPath path : kFastestFirst) {
    if (CpuPathAvailable(path)) {
      return path;
    }
  }
  return CpuPath::kPortable;
}

}  // namespace

std::string_view CpuPathName(CpuPath path) {
  switch (path) {
    case CpuPath::kReference:
      return "reference";
    case CpuPath::kPortable:
      return "portable";
    case CpuPath::kAvx2:
      return "avx2";
    case CpuPath::kAvx512:
      return "avx512";
  }
  CRUMB_CHECK(false, "not a CPU path");
}

bool CpuPathAvailable(CpuPath path) {
  static const bool kHasAvx2 = HasAvx2();
  static const bool kHasAvx512 = HasAvx512();
  switch (path) {
    case CpuPath::kReference:
    case CpuPath::kPortable:
      return true;
    case CpuPath::kAvx2:
      return kHasAvx2;
    case CpuPath::kAvx512:
      return kHasAvx512;
  }
  return false;
}

CpuPath BestCpuPath() {
  static const CpuPath kBest = FindBest();
  return kBest;
}

}  // namespace crumb
