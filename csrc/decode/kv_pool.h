// Keys and values in pages of kPage positions, shared by reference count: the samples of one request read the same
// pages of their prompt. A page spans all layers.
#pragma once

#include <cstdint>
#include <vector>

#include "decode/buffer.h"
#include "decode/decoder_config.h"
#include "decode/kernels.h"

namespace areal::decode {

class KvPool {
 public:
  // Memory is committed page by page as it is first used.
  KvPool(const DecoderConfig& config, int64_t pages);

  KvLayer layer(int64_t index);
  int32_t allocate();  // with one reference; throws areal::Error when none is left
  void retain(int32_t page) { ++references_[static_cast<size_t>(page)]; }
  void release(int32_t page);
  int64_t used_pages() const { return pages_ - static_cast<int64_t>(free_.size()); }

 private:
  int64_t num_layers_, pages_, page_floats_;
  KvLayer shape_;
  Buffer<float> storage_;  // [layers][pages][kv_heads][head_floats]
  std::vector<int32_t> references_;
  std::vector<int32_t> free_;  // last in, first out: recently used pages are warm
};

// The pages of one sequence, in order of slots. Owns a reference to each.
class PageTable {
 public:
  explicit PageTable(KvPool& pool) : pool_(&pool) {}
  PageTable(const PageTable&) = delete;
  PageTable& operator=(const PageTable&) = delete;
  ~PageTable();

  const int32_t* data() const { return pages_.data(); }
  // Grows to hold `slots` slots (see cache_slot).
  void reserve(int64_t slots);
  // Starts with the pages of other, which must not grow any more.
  void share(const PageTable& other);

 private:
  KvPool* pool_;
  std::vector<int32_t> pages_;
};

}  // namespace areal::decode
