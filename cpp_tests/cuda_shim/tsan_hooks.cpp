// The entry points that -fsanitize=thread calls, in place of libtsan. Host-side atomics of instrumented test code must
// work, so the __tsan_atomic* family forwards to the compiler's builtins; only plain accesses are checked.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "race_access.h"

using cuda_shim::race::on_access;

#define CUDA_SHIM_HOOKS(bytes)                                                                                        \
  void __tsan_read##bytes(void* address) { on_access(address, bytes, false, __builtin_return_address(0)); }           \
  void __tsan_write##bytes(void* address) { on_access(address, bytes, true, __builtin_return_address(0)); }           \
  void __tsan_unaligned_read##bytes(void* address) { on_access(address, bytes, false, __builtin_return_address(0)); } \
  void __tsan_unaligned_write##bytes(void* address) { on_access(address, bytes, true, __builtin_return_address(0)); } \
  void __tsan_volatile_read##bytes(void* address) { on_access(address, bytes, false, __builtin_return_address(0)); }  \
  void __tsan_volatile_write##bytes(void* address) { on_access(address, bytes, true, __builtin_return_address(0)); }

#define CUDA_SHIM_FETCH(bits, operation)                                                                         \
  uint##bits##_t __tsan_atomic##bits##_fetch_##operation(volatile uint##bits##_t* address, uint##bits##_t value, \
                                                         int) {                                                  \
    return __atomic_fetch_##operation(address, value, __ATOMIC_SEQ_CST);                                         \
  }

#define CUDA_SHIM_ATOMICS(bits)                                                                                 \
  uint##bits##_t __tsan_atomic##bits##_load(const volatile uint##bits##_t* address, int) {                      \
    return __atomic_load_n(address, __ATOMIC_SEQ_CST);                                                          \
  }                                                                                                             \
  void __tsan_atomic##bits##_store(volatile uint##bits##_t* address, uint##bits##_t value, int) {               \
    __atomic_store_n(address, value, __ATOMIC_SEQ_CST);                                                         \
  }                                                                                                             \
  uint##bits##_t __tsan_atomic##bits##_exchange(volatile uint##bits##_t* address, uint##bits##_t value, int) {  \
    return __atomic_exchange_n(address, value, __ATOMIC_SEQ_CST);                                               \
  }                                                                                                             \
  int __tsan_atomic##bits##_compare_exchange_strong(volatile uint##bits##_t* address, uint##bits##_t* expected, \
                                                    uint##bits##_t desired, int, int) {                         \
    return __atomic_compare_exchange_n(address, expected, desired, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);  \
  }                                                                                                             \
  int __tsan_atomic##bits##_compare_exchange_weak(volatile uint##bits##_t* address, uint##bits##_t* expected,   \
                                                  uint##bits##_t desired, int, int) {                           \
    return __atomic_compare_exchange_n(address, expected, desired, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);  \
  }                                                                                                             \
  CUDA_SHIM_FETCH(bits, add)                                                                                    \
  CUDA_SHIM_FETCH(bits, sub)                                                                                    \
  CUDA_SHIM_FETCH(bits, and)                                                                                    \
  CUDA_SHIM_FETCH(bits, or)                                                                                     \
  CUDA_SHIM_FETCH(bits, xor)

extern "C" {

CUDA_SHIM_HOOKS(1)
CUDA_SHIM_HOOKS(2)
CUDA_SHIM_HOOKS(4)
CUDA_SHIM_HOOKS(8)
CUDA_SHIM_HOOKS(16)

void __tsan_read_range(void* address, size_t bytes) { on_access(address, bytes, false, __builtin_return_address(0)); }
void __tsan_write_range(void* address, size_t bytes) { on_access(address, bytes, true, __builtin_return_address(0)); }
void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
  on_access(from, bytes, false, __builtin_return_address(0));
  on_access(to, bytes, true, __builtin_return_address(0));
  return std::memcpy(to, from, bytes);
}
void* __tsan_memmove(void* to, const void* from, size_t bytes) {
  on_access(from, bytes, false, __builtin_return_address(0));
  on_access(to, bytes, true, __builtin_return_address(0));
  return std::memmove(to, from, bytes);
}
void* __tsan_memset(void* address, int value, size_t bytes) {
  on_access(address, bytes, true, __builtin_return_address(0));
  return std::memset(address, value, bytes);
}

CUDA_SHIM_ATOMICS(8)
CUDA_SHIM_ATOMICS(16)
CUDA_SHIM_ATOMICS(32)
CUDA_SHIM_ATOMICS(64)
void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
void __tsan_atomic_signal_fence(int) { __atomic_signal_fence(__ATOMIC_SEQ_CST); }

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}

}  // extern "C"
