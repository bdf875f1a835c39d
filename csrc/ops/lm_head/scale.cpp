#include "ops/lm_head/scale.h"

#include <algorithm>

#include "base/threads.h"

namespace areal {
namespace {

constexpr int64_t kGrainElements = 1 << 16;

void scale_one(void* values, DType dtype, int64_t count, float factor) {
  AREAL_ISA_DISPATCH(scale_row(values, dtype, count, factor));
}
void scale_one(void* values, DType, int64_t count, double factor) {
  for (double* x = static_cast<double*>(values); count > 0; --count) *x++ *= factor;
}

template <class Real>
void run(const ScaleArgs& args) {
  const Real factor = *static_cast<const Real*>(args.factor);
  if (factor == 1) return;
  const int64_t row_bytes = args.row_stride * static_cast<int64_t>(dtype_size_bytes(args.dtype));
  const int64_t grain = std::max<int64_t>(kGrainElements / std::max<int64_t>(args.columns, 1), 1);
  parallel_for(0, args.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      scale_one(static_cast<char*>(args.values) + row * row_bytes, args.dtype, args.columns, factor);
    }
  });
}

}  // namespace

void scale_cpu(const ScaleArgs& args) { args.dtype == DType::kFloat64 ? run<double>(args) : run<float>(args); }

}  // namespace areal
