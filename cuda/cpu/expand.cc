// SPDX-License-Identifier: Apache-2.0
#include "crumb/cuda/expand.h"

#include "cuda/reference/expand.h"
#include "proto/base/check.h"
#include "proto/page/page_format.h"

namespace crumb {

void ExpandHeadBlock(const HeadParameters& head,
                     std::span<const std::byte> block,
                     ExpandSpace space,
                     std::span<BFloat16> keys,
                     std::span<BFloat16> values,
                     CpuPath path) {
  CRUMB_CHECK(keys.size() == size_t{kPageTokens} * head.key_dim, "keys of another length");
  CRUMB_CHECK(values.size() == size_t{kPageTokens} * head.value_dim, "values of another length");
  CRUMB_CHECK(block.size() == (Int2HeadBlock{head.key_dim, head.value_dim}.bytes()),
              "block of another length");
  static_cast<void>(path);
  reference::ExpandHeadBlock(head, block, space, keys, values);
}

}  // namespace crumb
