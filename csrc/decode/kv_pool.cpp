#include "decode/kv_pool.h"

#include <numeric>

namespace areal::decode {

KvPool::KvPool(const DecoderConfig& config, int64_t pages)
    : num_layers_(config.num_layers), pages_(pages), references_(static_cast<size_t>(pages), 0) {
  shape_ = {nullptr, config.num_kv_heads, config.head_dim, round_up(config.head_dim, kPad), 0};
  shape_.head_floats = kPage * (shape_.head_dim + shape_.value_ld);
  page_floats_ = shape_.kv_heads * shape_.head_floats;
  storage_ = Buffer<float>(num_layers_ * pages_ * page_floats_);
  free_.resize(static_cast<size_t>(pages));
  std::iota(free_.rbegin(), free_.rend(), 0);
}

KvLayer KvPool::layer(int64_t index) {
  KvLayer layer = shape_;
  layer.pages = storage_.data() + index * pages_ * page_floats_;
  return layer;
}

int32_t KvPool::allocate() {
  AREAL_CHECK(!free_.empty(), "KvPool: expected a free page, got none of ", pages_);
  const int32_t page = free_.back();
  free_.pop_back();
  references_[static_cast<size_t>(page)] = 1;
  return page;
}

void KvPool::release(int32_t page) {
  if (--references_[static_cast<size_t>(page)] == 0) free_.push_back(page);
}

PageTable::~PageTable() {
  for (const int32_t page : pages_) pool_->release(page);
}

void PageTable::reserve(int64_t slots) {
  while (static_cast<int64_t>(pages_.size()) * kPage < slots) pages_.push_back(pool_->allocate());
}

void PageTable::share(const PageTable& other) {
  for (const int32_t page : other.pages_) {
    pool_->retain(page);
    pages_.push_back(page);
  }
}

}  // namespace areal::decode
