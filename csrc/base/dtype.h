// Element types of the streams that ops read and write, and the one dispatcher from a run-time DType to a
// C++ type. bf16 and fp16 are stored as 16-bit words here; arithmetic is always done in float or double.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "base/check.h"

namespace areal {

enum class DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kFloat64 = 3 };

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat16:
      return "float16";
    case DType::kFloat64:
      return "float64";
  }
  return "unknown";
}

inline size_t dtype_size_bytes(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return 4;
    case DType::kBFloat16:
      return 2;
    case DType::kFloat16:
      return 2;
    case DType::kFloat64:
      return 8;
  }
  return 0;
}

template <class T>
struct TypeTag {
  using type = T;
};

// Calls fn(TypeTag<T>{}) with the C++ type of dtype: dispatch_dtype(dtype, "op", [&](auto tag) { using T = ...; }).
template <class Fn>
decltype(auto) dispatch_dtype(DType dtype, const char* op, Fn&& fn) {
  switch (dtype) {
    case DType::kFloat32:
      return fn(TypeTag<float>{});
    case DType::kBFloat16:
      return fn(TypeTag<BFloat16>{});
    case DType::kFloat16:
      return fn(TypeTag<Float16>{});
    case DType::kFloat64:
      return fn(TypeTag<double>{});
  }
  throw Error(format_message(op, ": expected dtype in {float32, bfloat16, float16, float64}, got code ",
                             static_cast<int32_t>(dtype)));
}

}  // namespace areal
