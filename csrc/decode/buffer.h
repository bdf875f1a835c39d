// A 64-byte aligned array that is not initialised: memory of a large one is committed when first written.
#pragma once

#if defined(__linux__)
#include <sys/mman.h>
#endif

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
    constexpr size_t kHugePage = 2 << 20;
    const size_t wanted = static_cast<size_t>(size) * sizeof(T), alignment = wanted >= kHugePage ? kHugePage : 64;
    const size_t bytes = (wanted + alignment - 1) / alignment * alignment;
    if (bytes == 0) return;
    data_.reset(static_cast<T*>(std::aligned_alloc(alignment, bytes)));
    if (data_ == nullptr) throw std::bad_alloc();
#if defined(__linux__)
    if (alignment == kHugePage) madvise(data_.get(), bytes, MADV_HUGEPAGE);  // a hint: failure costs speed alone
#endif
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
