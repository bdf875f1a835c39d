// What each instruction-set build of rowwise_cpu.cpp exports: loops over a range of rows.
#pragma once

#include <cstdint>

#include "base/isa.h"
#include "ops/layers/rowwise.h"

namespace areal {

AREAL_ISA_DECLARE(void rms_norm_forward_rows(const layers::RmsNorm& norm, int64_t begin, int64_t end, float* y,
                                             float* inverse))
// grad_weight is added to: the caller gives each range its own.
AREAL_ISA_DECLARE(void rms_norm_backward_rows(const layers::RmsNorm& norm, int64_t begin, int64_t end,
                                              const float* inverse, const float* grad_y, float* grad_x,
                                              float* grad_weight))
AREAL_ISA_DECLARE(void swiglu_forward_rows(const float* gate_up, int64_t begin, int64_t end, int64_t inner, float* y))
AREAL_ISA_DECLARE(void swiglu_backward_rows(const float* gate_up, const float* grad_y, int64_t begin, int64_t end,
                                            int64_t inner, float* grad_gate_up))

}  // namespace areal
