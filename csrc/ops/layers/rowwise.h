// The row-wise layers of a decoder block, forward and backward, float32 on the CPU.
//
//   RMSNorm   y = x r w,  r = 1 / sqrt(mean(x^2) + eps)
//             dL/dx = r g - x r^3 mean(g x),  g = dL/dy w;      dL/dw = sum over rows of dL/dy x r
//   SwiGLU    y = silu(gate) up,  silu(g) = g s,  s = 1 / (1 + e^-g)
//             dL/dup = dL/dy g s;      dL/dgate = dL/dy up s (1 + g (1 - s))
//
// All matrices are contiguous, row-major. Bitwise the same for any number of threads. NaN and inf spread as arithmetic
// has it; a row never touches another.
#pragma once

#include <cstdint>

namespace areal::layers {

struct RmsNorm {
  const float* x = nullptr;       // [rows, width]
  const float* weight = nullptr;  // [width]
  int64_t rows = 0;
  int64_t width = 0;
  float eps = 0;
};

// Writes y [rows, width] and inverse [rows], the r of each row, which backward needs.
void rms_norm_forward(const RmsNorm& norm, float* y, float* inverse);

// Adds to grad_x [rows, width] (the residual stream: the other term is there already) and writes grad_weight [width].
void rms_norm_backward(const RmsNorm& norm, const float* inverse, const float* grad_y, float* grad_x,
                       float* grad_weight);

// gate_up [rows, 2 inner]: a row is its gates, then its ups. Writes y [rows, inner].
void swiglu_forward(const float* gate_up, int64_t rows, int64_t inner, float* y);

// Writes grad_gate_up [rows, 2 inner].
void swiglu_backward(const float* gate_up, const float* grad_y, int64_t rows, int64_t inner, float* grad_gate_up);

}  // namespace areal::layers
