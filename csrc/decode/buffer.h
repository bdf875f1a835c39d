// An aligned array that is not initialised. A large one is mapped without reserving memory: pages are committed when
// first written, so an array may be sized for the worst case.
#pragma once

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>

namespace areal::decode {

constexpr int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

template <class T>
class Buffer {
 public:
  Buffer() = default;
  // Throws std::bad_alloc.
  explicit Buffer(int64_t size) : size_(size) {
    if (size > 0) allocate(static_cast<size_t>(size) * sizeof(T));
  }
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Buffer() {
#if defined(__linux__)
    if (mapped_bytes_ > 0) {
      munmap(memory_, mapped_bytes_);
      return;
    }
#endif
    std::free(memory_);
  }

  T* data() { return data_; }
  const T* data() const { return data_; }
  int64_t size() const { return size_; }

 private:
  static constexpr size_t kHugePage = 2 << 20;

  void allocate(size_t bytes) {
#if defined(__linux__)
    if (bytes >= 2 * kHugePage) {
      mapped_bytes_ = bytes + kHugePage;  // room to align
      memory_ =
          mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (memory_ == MAP_FAILED) throw std::bad_alloc();
      const auto address = (reinterpret_cast<uintptr_t>(memory_) + kHugePage - 1) / kHugePage * kHugePage;
      data_ = reinterpret_cast<T*>(address);
      madvise(data_, bytes, MADV_HUGEPAGE);  // a hint: failure costs speed alone
      return;
    }
#endif
    memory_ = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (memory_ == nullptr) throw std::bad_alloc();
    data_ = static_cast<T*>(memory_);
  }

  void swap(Buffer& other) {
    std::swap(memory_, other.memory_);
    std::swap(mapped_bytes_, other.mapped_bytes_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
  }

  void* memory_ = nullptr;
  size_t mapped_bytes_ = 0;  // 0: memory_ is from the heap
  T* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace areal::decode
