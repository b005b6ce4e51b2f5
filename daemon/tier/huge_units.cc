// SPDX-License-Identifier: Apache-2.0
#include "daemon/tier/huge_units.h"

#include <algorithm>

#include "proto/base/huge_page.h"

namespace crumb {

HugeUnits::HugeUnits(std::span<std::byte> mapping)
    : mapping_(mapping), units_(mapping.size() / kHugePageBytes, State::kNone) {}

bool HugeUnits::Ask(std::span<std::byte> bytes) {
  const auto begin = static_cast<size_t>(bytes.data() - mapping_.data());
  const size_t end_unit = (begin + bytes.size() + kHugePageBytes - 1) / kHugePageBytes;
  absl::MutexLock lock(&mutex_);
  const std::span<State> touched = std::span(units_).first(std::min(end_unit, units_.size()));
  const size_t first = std::min(begin / kHugePageBytes, touched.size());
  for (size_t unit = first; unit < touched.size(); ++unit) {
    if (touched[unit] != State::kNone) {
      continue;
    }
    touched[unit] = State::kBeingAsked;
    mutex_.Unlock();
    const auto memory = mapping_.subspan(unit * kHugePageBytes, kHugePageBytes);
    const bool is_given = AskForHugePages(mapping_, memory);
    mutex_.Lock();
    touched[unit] = is_given ? State::kGiven : State::kRefused;
  }
  const auto range = touched.subspan(first);
  const auto are_answered = [range] {
    return std::find(range.begin(), range.end(), State::kBeingAsked) == range.end();
  };
  mutex_.Await(absl::Condition(&are_answered));
  return end_unit <= units_.size() && std::all_of(range.begin(), range.end(), [](State state) {
           return state == State::kGiven;
         });
}

}  // namespace crumb
