// A 64-byte aligned array that is not initialised: memory of a large one is committed when first written.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace areal::decode {

constexpr int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

template <class T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t size) : size_(size) {
    const size_t bytes = static_cast<size_t>(round_up(size * static_cast<int64_t>(sizeof(T)), 64));
    if (bytes == 0) return;
    data_.reset(static_cast<T*>(std::aligned_alloc(64, bytes)));
    if (data_ == nullptr) throw std::bad_alloc();
  }
  T* data() { return data_.get(); }
  const T* data() const { return data_.get(); }
  int64_t size() const { return size_; }

 private:
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T, Free> data_;
  int64_t size_ = 0;
};

}  // namespace areal::decode
