// 16-byte access to rows that start anywhere. A row is cut at 16-byte boundaries into a head of single elements, whole
// vectors, and a tail of single elements; kernels treat head and tail as vectors that are not full. So the length of a
// row, its stride and its alignment cost at most two vectors of single accesses, whatever they are.
#pragma once

#include <cstring>

#include "base/check.h"
#include "base/dtype.h"
#include "cuda/port.cuh"

namespace areal::cuda {

template <class T>
inline constexpr int kVectorLength = 16 / static_cast<int>(sizeof(T));

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }

__device__ __forceinline__ void from_float(float x, float* out) { *out = x; }
__device__ __forceinline__ void from_float(float x, __nv_bfloat16* out) { *out = __float2bfloat16_rn(x); }
__device__ __forceinline__ void from_float(float x, __half* out) { *out = __float2half_rn(x); }

// The cut of a row of `count` elements. Offsets are in elements from the start of the row.
struct RowCut {
  int head;         // elements before the first vector, fewer than a vector holds
  int64_t vectors;  // vector i begins at element head + i * kLength
  int tail;         // elements after the last vector
};

template <class T, int kLength = kVectorLength<T>>
__device__ __forceinline__ RowCut cut_row(const T* row, int64_t count) {
  const int past = static_cast<int>(reinterpret_cast<uintptr_t>(row) / sizeof(T) % kLength);
  const int64_t to_boundary = (kLength - past) % kLength, head = to_boundary < count ? to_boundary : count;
  const int64_t vectors = (count - head) / kLength;
  return {static_cast<int>(head), vectors, static_cast<int>(count - head - vectors * kLength)};
}

// Streams 16 bytes that nobody writes during the kernel and that this kernel will not read again.
__device__ __forceinline__ uint4 load_streaming(const uint4* p) {
#if defined(__CUDA_ARCH__)
  uint4 v;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(p));
  return v;
#else
  return __ldg(p);
#endif
}

__device__ __forceinline__ void unpack(const uint4& v, float (&out)[4], const float*) {
  out[0] = __uint_as_float(v.x);
  out[1] = __uint_as_float(v.y);
  out[2] = __uint_as_float(v.z);
  out[3] = __uint_as_float(v.w);
}
__device__ __forceinline__ void unpack(const uint4& v, float (&out)[8], const __nv_bfloat16*) {
  const unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out[2 * i] = __uint_as_float(words[i] << 16);
    out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}
__device__ __forceinline__ void unpack(const uint4& v, float (&out)[8], const __half*) {
  const unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __half2_raw raw{static_cast<unsigned short>(words[i] & 0xffffu), static_cast<unsigned short>(words[i] >> 16)};
    const float2 pair = __half22float2(__half2(raw));
    out[2 * i] = pair.x;
    out[2 * i + 1] = pair.y;
  }
}

// Rounded to nearest even.
__device__ __forceinline__ uint4 pack(const float (&in)[4], const float*) {
  return make_uint4(__float_as_uint(in[0]), __float_as_uint(in[1]), __float_as_uint(in[2]), __float_as_uint(in[3]));
}
template <class Pair>
__device__ __forceinline__ unsigned as_word(const Pair& pair) {
  static_assert(sizeof(Pair) == 4);
  unsigned word;
  memcpy(&word, &pair, sizeof word);
  return word;
}
__device__ __forceinline__ uint4 pack(const float (&in)[8], const __nv_bfloat16*) {
  return make_uint4(as_word(__floats2bfloat162_rn(in[0], in[1])), as_word(__floats2bfloat162_rn(in[2], in[3])),
                    as_word(__floats2bfloat162_rn(in[4], in[5])), as_word(__floats2bfloat162_rn(in[6], in[7])));
}
__device__ __forceinline__ uint4 pack(const float (&in)[8], const __half*) {
  return make_uint4(as_word(__floats2half2_rn(in[0], in[1])), as_word(__floats2half2_rn(in[2], in[3])),
                    as_word(__floats2half2_rn(in[4], in[5])), as_word(__floats2half2_rn(in[6], in[7])));
}

// A vector at an address that cut_row says is aligned; streaming: see load_streaming. kLength 1 loads one element.
template <bool kStreaming, class T, int kLength>
__device__ __forceinline__ void load_vector(const T* p, float (&out)[kLength]) {
  if constexpr (kLength == 1) {
    out[0] = to_float(*p);
  } else {
    static_assert(kLength == kVectorLength<T>);
    const uint4* vector = reinterpret_cast<const uint4*>(p);
    unpack(kStreaming ? load_streaming(vector) : *vector, out, static_cast<const T*>(nullptr));
  }
}

// The first `count` elements at p, one by one; the rest of `out` becomes `fill`.
template <class T, int kLength>
__device__ __forceinline__ void load_part(const T* p, int count, float fill, float (&out)[kLength]) {
#pragma unroll
  for (int i = 0; i < kLength; ++i) out[i] = i < count ? to_float(p[i]) : fill;
}

template <class T, int kLength>
__device__ __forceinline__ void store_part(T* p, int count, const float (&values)[kLength]) {
#pragma unroll
  for (int i = 0; i < kLength; ++i) {
    if (i < count) from_float(values[i], p + i);
  }
}

// At an address that cut_row says is aligned.
template <class T, int kLength>
__device__ __forceinline__ void store_vector(T* p, const float (&values)[kLength]) {
  if constexpr (kLength == 1) {
    from_float(values[0], p);
  } else {
    static_assert(kLength == kVectorLength<T>);
    // An assignment would do, but nvcc 13 splits it into four stores.
    __stcs(reinterpret_cast<uint4*>(p), pack(values, static_cast<const T*>(nullptr)));
  }
}

// Calls fn(TypeTag<T>{}) with the device type of dtype. There is no float64 on the device.
template <class Fn>
void dispatch_device_dtype(DType dtype, const char* op, Fn&& fn) {
  switch (dtype) {
    case DType::kFloat32:
      return fn(TypeTag<float>{});
    case DType::kBFloat16:
      return fn(TypeTag<__nv_bfloat16>{});
    case DType::kFloat16:
      return fn(TypeTag<__half>{});
    case DType::kFloat64:
      break;
  }
  throw Error(format_message(op, ": expected dtype in {float32, bfloat16, float16} on CUDA, got ", dtype_name(dtype)));
}

}  // namespace areal::cuda
