// SPDX-License-Identifier: Apache-2.0
//
// The version of this source, as programs and the library report it.
#pragma once

namespace crumb {

inline constexpr const char* kCrumbVersion = "0.1.0";

}  // namespace crumb
