// A gradient that forward has computed, times the gradient of the loss, which is known in backward and nearly always 1.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "base/isa.h"

namespace areal {

struct ScaleArgs {
  void* values = nullptr;  // [rows, columns], element stride 1
  DType dtype = DType::kFloat32;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t row_stride = 0;        // in elements, at least columns
  const void* factor = nullptr;  // [1]: double where the values are float64, else float
};

// values *= *factor, rounded once. Where the factor is exactly 1 the values are not touched; on CUDA it stays on the
// device, asynchronous on `stream` (a cudaStream_t).
void scale_cpu(const ScaleArgs& args);
void scale_cuda(const ScaleArgs& args, void* stream);

// One row, not float64.
AREAL_ISA_DECLARE(void scale_row(void* values, DType dtype, int64_t count, float factor))

}  // namespace areal
