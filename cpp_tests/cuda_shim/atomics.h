// Read-modify-write atomics and fences. The value parameter is a non-deduced context, so that atomicAdd(&u, 1) works as
// it does with nvcc's overloads.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "engine.h"

namespace cuda_shim {

template <size_t kBytes>
struct UnsignedOfSize;
template <>
struct UnsignedOfSize<2> {
  using type = uint16_t;
};
template <>
struct UnsignedOfSize<4> {
  using type = uint32_t;
};
template <>
struct UnsignedOfSize<8> {
  using type = uint64_t;
};

// Replaces *address by update(old) and returns the old value. Not inlined and not instrumented: the race checker must
// see one atomic access at the caller's line, and no plain ones.
template <class T, class Update>
__attribute__((noinline, no_sanitize("thread"))) T read_modify_write(T* address, Update update) {
  using Bits = typename UnsignedOfSize<sizeof(T)>::type;
  note_atomic(address, sizeof(T), __builtin_return_address(0));
  T old, updated;
  Bits bits;
  std::memcpy(static_cast<void*>(&old), address, sizeof old);
  updated = update(old);
  std::memcpy(&bits, &updated, sizeof bits);
  std::memcpy(static_cast<void*>(address), &bits, sizeof bits);  // blocks run one at a time: nothing can intervene
  return old;
}

template <class T>
using NoDeduce = std::type_identity_t<T>;

}  // namespace cuda_shim

template <class T>
CUDA_SHIM_INLINE T atomicAdd(T* address, cuda_shim::NoDeduce<T> value) {
  return cuda_shim::read_modify_write(address, [value](T old) { return static_cast<T>(old + value); });
}
template <class T>
CUDA_SHIM_INLINE T atomicSub(T* address, cuda_shim::NoDeduce<T> value) {
  return cuda_shim::read_modify_write(address, [value](T old) { return static_cast<T>(old - value); });
}
template <class T>
CUDA_SHIM_INLINE T atomicMax(T* address, cuda_shim::NoDeduce<T> value) {
  return cuda_shim::read_modify_write(address, [value](T old) { return old > value ? old : value; });
}
template <class T>
CUDA_SHIM_INLINE T atomicMin(T* address, cuda_shim::NoDeduce<T> value) {
  return cuda_shim::read_modify_write(address, [value](T old) { return old < value ? old : value; });
}
template <class T>
CUDA_SHIM_INLINE T atomicAnd(T* address, cuda_shim::NoDeduce<T> value) {
  return cuda_shim::read_modify_write(address, [value](T old) { return static_cast<T>(old & value); });
}
template <class T>
CUDA_SHIM_INLINE T atomicOr(T* address, cuda_shim::NoDeduce<T> value) {
  return cuda_shim::read_modify_write(address, [value](T old) { return static_cast<T>(old | value); });
}
template <class T>
CUDA_SHIM_INLINE T atomicXor(T* address, cuda_shim::NoDeduce<T> value) {
  return cuda_shim::read_modify_write(address, [value](T old) { return static_cast<T>(old ^ value); });
}
template <class T>
CUDA_SHIM_INLINE T atomicExch(T* address, cuda_shim::NoDeduce<T> value) {
  return cuda_shim::read_modify_write(address, [value](T) { return value; });
}
template <class T>
CUDA_SHIM_INLINE T atomicCAS(T* address, cuda_shim::NoDeduce<T> expected, cuda_shim::NoDeduce<T> desired) {
  return cuda_shim::read_modify_write(address, [=](T old) { return old == expected ? desired : old; });
}
CUDA_SHIM_INLINE unsigned atomicInc(unsigned* address, unsigned limit) {
  return cuda_shim::read_modify_write(address, [limit](unsigned old) { return old >= limit ? 0u : old + 1u; });
}
CUDA_SHIM_INLINE unsigned atomicDec(unsigned* address, unsigned limit) {
  return cuda_shim::read_modify_write(address,
                                      [limit](unsigned old) { return old == 0 || old > limit ? limit : old - 1u; });
}

inline void __threadfence() { cuda_shim::note_fence(); }
inline void __threadfence_system() { cuda_shim::note_fence(); }
inline void __threadfence_block() {}
