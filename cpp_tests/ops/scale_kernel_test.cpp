// scale_kernels.cuh on the CPU: rows that start anywhere, every tail, and nothing touched beside them.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "cuda/vec.cuh"
#include "cuda_shim/orders.h"
#include "ops/lm_head/scale.h"

namespace areal {
namespace {

template <class T>
void check(DType dtype, int64_t rows, int64_t columns, int64_t offset, float factor) {
  const int64_t stride = columns + offset + 3;
  std::vector<T> values(static_cast<size_t>(rows * stride + offset));
  for (size_t i = 0; i < values.size(); ++i) cuda::from_float(std::sin(static_cast<float>(i)) * 7, &values[i]);
  const std::vector<T> before = values;
  scale_cuda({values.data() + offset, dtype, rows, columns, stride, &factor}, nullptr);
  for (int64_t i = 0; i < static_cast<int64_t>(values.size()); ++i) {
    const bool inside = i >= offset && (i - offset) / stride < rows && (i - offset) % stride < columns;
    T expected;
    cuda::from_float(cuda::to_float(before[i]) * (inside ? factor : 1.0f), &expected);
    ASSERT_EQ(cuda::to_float(values[i]), cuda::to_float(expected)) << "element " << i << ", columns " << columns;
  }
}

TEST(ScaleKernel, EveryTailAndAlignment) {
  cuda_shim::for_each_order([] {
    for (int64_t columns : {0, 1, 7, 8, 31, 33, 1003, 9000}) {
      for (int64_t offset : {0, 1, 5}) {
        check<float>(DType::kFloat32, 2, columns, offset, -1.5f);
        check<__nv_bfloat16>(DType::kBFloat16, 2, columns, offset, 0.3f);
        check<__half>(DType::kFloat16, 2, columns, offset, 0.3f);
      }
    }
  });
}

TEST(ScaleKernel, MoreRowsThanBlocks) { check<float>(DType::kFloat32, 100, 9, 1, 2.0f); }

TEST(ScaleKernel, NoRows) { check<float>(DType::kFloat32, 0, 9, 0, 2.0f); }

TEST(ScaleKernel, OneTouchesNothing) {
  const float one = 1;
  scale_cuda({nullptr, DType::kFloat32, 3, 1 << 20, 1 << 20, &one}, nullptr);  // memory that is not there
  check<float>(DType::kFloat32, 2, 33, 1, 1.0f);
}

}  // namespace
}  // namespace areal
