#include "base/simd.h"
#include "ops/lm_head/scale.h"

namespace areal::AREAL_ISA {
namespace {

template <class T>
AREAL_INLINE void scale(T* x, int64_t count, float factor) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(x + i, load(x + i) * splat(factor));
  for (; i < count; ++i) from_float(to_float(x[i]) * factor, x + i);
}

}  // namespace

void scale_row(void* values, DType dtype, int64_t count, float factor) {
  switch (dtype) {
    case DType::kBFloat16:
      return scale(static_cast<BFloat16*>(values), count, factor);
    case DType::kFloat16:
      return scale(static_cast<Float16*>(values), count, factor);
    default:
      return scale(static_cast<float*>(values), count, factor);
  }
}

}  // namespace areal::AREAL_ISA
