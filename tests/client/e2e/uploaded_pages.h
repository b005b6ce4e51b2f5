// SPDX-License-Identifier: Apache-2.0
//
// What an upload has, as pages that an engine publishes from its GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

#include "crumb/client.h"

namespace crumb {

class UploadedPages : public GpuPages {
 public:
  UploadedPages(const GpuUpload& upload, uint32_t num_tokens)
      : upload_(upload), num_tokens_(num_tokens) {}
  uint32_t length() const override { return num_tokens_; }
  const ProfileId* profile_id() const override { return profile_id_; }
  HeadRange heads() const override { return heads_; }
  void SetRows(const ProfileId* profile_id, const HeadRange& heads) {
    profile_id_ = profile_id;
    heads_ = heads;
  }
  // Instead of its place on the device.
  void MovePage(PageIdx page, const std::byte* address) { moved_[page.value()] = address; }
  const std::byte* Page(PageIdx page, PageEncoding encoding) const override {
    const auto moved = moved_.find(page.value());
    return moved == moved_.end() ? upload_.Page(page, encoding) : moved->second;
  }

 private:
  const GpuUpload& upload_;
  const uint32_t num_tokens_;
  const ProfileId* profile_id_ = nullptr;
  HeadRange heads_;
  std::map<uint32_t, const std::byte*> moved_;
};

}  // namespace crumb
