// What each instruction-set build of logprob_cpu.cpp exports: the loops over one block of a row, a few KB that stay
// in L1 between the pass for the maximum and the pass for the sums. Pointers are to dtype elements (not float64).
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "base/isa.h"
#include "ops/logprob/logprob_math.h"

namespace areal {

inline constexpr int64_t kLogprobBlock = 4096;  // elements: 16 KB of float32, half of a small L1

AREAL_ISA_DECLARE(float logprob_load(const void* element, DType dtype))
AREAL_ISA_DECLARE(void logprob_store(float value, void* element, DType dtype))

// At most kLogprobBlock elements; scale = log2(e) / temperature.
AREAL_ISA_DECLARE(logprob::Partial<double> logprob_forward_block(const void* logits, DType dtype, int64_t count,
                                                                 float scale))

// The gradient of every element, as if none were the label. grad may be logits.
AREAL_ISA_DECLARE(void logprob_backward_block(const void* logits, void* grad, DType dtype, int64_t count,
                                              const logprob::RowGradient<float>& row))

}  // namespace areal
