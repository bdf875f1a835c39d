#include "decode/kv_pool.h"

#include <cstring>
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

void KvPool::copy(int32_t from, int32_t to) {
  for (int64_t l = 0; l < num_layers_; ++l) {
    float* pages = layer(l).pages;
    std::memcpy(pages + to * page_floats_, pages + from * page_floats_,
                static_cast<size_t>(page_floats_) * sizeof(float));
  }
}

PageTable::~PageTable() {
  for (const int32_t page : pages_) pool_->release(page);
}

void PageTable::reserve_positions(int64_t positions) {
  while (static_cast<int64_t>(pages_.size()) * kPage < positions) pages_.push_back(pool_->allocate());
}

void PageTable::fork(const PageTable& other, int64_t positions) {
  const auto whole = other.pages_.begin() + positions / kPage;
  for (auto page = other.pages_.begin(); page != whole; ++page) {
    pool_->retain(*page);
    pages_.push_back(*page);
  }
  reserve_positions(positions);
  refresh_fork(other, positions);
}

void PageTable::refresh_fork(const PageTable& other, int64_t positions) {
  const size_t last = static_cast<size_t>(positions / kPage);
  if (positions % kPage != 0) pool_->copy(other.pages_[last], pages_[last]);
}

}  // namespace areal::decode
