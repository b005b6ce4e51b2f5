// SPDX-License-Identifier: Apache-2.0
#include "cuda/checkpoint/pickle.h"

#include <iterator>

#include "cuda/checkpoint/pickle_machine.h"

namespace crumb::checkpoint {

std::string_view TypeName(const PickleValue& value) {
  constexpr std::string_view kNames[] = {"None",     "a bool",    "an integer", "a number",
                                         "text",     "a tuple",   "a list",     "a dict",
                                         "a global", "a storage", "a tensor"};
  static_assert(std::size(kNames) == std::variant_size_v<PickleValue>);
  return kNames[value.index()];
}

const PickleValue* PickleTree::Find(const PickleDict& dict, std::string_view key) const {
  for (auto item = dict.items.rbegin(); item != dict.items.rend(); ++item) {
    const auto* text = Get<std::string>(item->first);
    if (text != nullptr && *text == key) {
      return &values[item->second];
    }
  }
  return nullptr;
}

absl::StatusOr<PickleTree> ParsePickle(std::span<const std::byte> pickle) {
  return PickleMachine(pickle).Run();
}

}  // namespace crumb::checkpoint
