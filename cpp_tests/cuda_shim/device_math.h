// Cached loads and stores, fast maths and bit operations. The fast functions follow the device's way (__expf: a rounded
// product, then exp2), so that their error grows as it does there; the last 2 ulp of ex2.approx and lg2.approx are not
// imitated.
#pragma once

#include <math.h>  // expf, isnan and the rest in the global namespace, as CUDA has them
#include <math_constants.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>

#include "engine.h"

namespace cuda_shim {

template <class T>
void check_aligned(const T* address, Location where) {
  const auto bits = reinterpret_cast<uintptr_t>(address);
  if (bits % alignof(T) != 0) {
    fail("access of " + std::to_string(sizeof(T)) + " bytes at an address that is " +
             std::to_string(bits % alignof(T)) + " past a multiple of " + std::to_string(alignof(T)),
         where);
  }
}

// The device moves the whole vector even when only a part of it is used; touching both ends shows that to ASan.
template <class T>
CUDA_SHIM_INLINE T load(const T* address, Location where) {
  check_aligned(address, where);
#if defined(CUDA_SHIM_ASAN)
  const volatile char* bytes = reinterpret_cast<const char*>(address);
  (void)bytes[0];
  (void)bytes[sizeof(T) - 1];
#endif
  return *address;
}

template <class T>
CUDA_SHIM_INLINE void store(T* address, T value, Location where) {
  check_aligned(address, where);
  *address = value;
}

}  // namespace cuda_shim

#define CUDA_SHIM_LOAD(name)                                    \
  template <class T>                                            \
  CUDA_SHIM_INLINE T name(const T* address, CUDA_SHIM_CALLER) { \
    return cuda_shim::load(address, CUDA_SHIM_HERE);            \
  }
CUDA_SHIM_LOAD(__ldg)
CUDA_SHIM_LOAD(__ldca)
CUDA_SHIM_LOAD(__ldcg)
CUDA_SHIM_LOAD(__ldcs)
CUDA_SHIM_LOAD(__ldcv)
CUDA_SHIM_LOAD(__ldlu)
#undef CUDA_SHIM_LOAD

#define CUDA_SHIM_STORE(name)                                                               \
  template <class T>                                                                        \
  CUDA_SHIM_INLINE void name(T* address, std::type_identity_t<T> value, CUDA_SHIM_CALLER) { \
    cuda_shim::store(address, value, CUDA_SHIM_HERE);                                       \
  }
CUDA_SHIM_STORE(__stwb)
CUDA_SHIM_STORE(__stcg)
CUDA_SHIM_STORE(__stcs)
CUDA_SHIM_STORE(__stwt)
#undef CUDA_SHIM_STORE

using std::max;
using std::min;

inline float __expf(float x) { return std::exp2(x * 1.44269504f); }
inline float __exp10f(float x) { return std::exp2(x * 3.32192809f); }
inline float __log2f(float x) { return std::log2(x); }
inline float __logf(float x) { return std::log2(x) * 0.693147181f; }
inline float __log10f(float x) { return std::log2(x) * 0.301029996f; }
inline float __powf(float x, float y) { return std::exp2(y * std::log2(x)); }
inline float __tanhf(float x) { return std::tanh(x); }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
inline float __fdividef(float a, float b) {  // 1/b is flushed to zero where it would be subnormal
  return std::fabs(b) > 0x1p126f ? a * 0.0f : a * (1.0f / b);
}
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __frsqrt_rn(float x) { return 1.0f / std::sqrt(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(x)); }

namespace cuda_shim {
template <class To, class From>
To bit_copy(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
}  // namespace cuda_shim

inline float __int_as_float(int x) { return cuda_shim::bit_copy<float>(x); }
inline float __uint_as_float(unsigned x) { return cuda_shim::bit_copy<float>(x); }
inline int __float_as_int(float x) { return cuda_shim::bit_copy<int>(x); }
inline unsigned __float_as_uint(float x) { return cuda_shim::bit_copy<unsigned>(x); }
inline double __longlong_as_double(long long x) { return cuda_shim::bit_copy<double>(x); }
inline long long __double_as_longlong(double x) { return cuda_shim::bit_copy<long long>(x); }
