#include "ops/layers/rowwise.h"

#include <algorithm>
#include <vector>

#include "base/threads.h"
#include "ops/layers/rowwise_cpu.h"

namespace areal::layers {
namespace {

constexpr int64_t kGrainElements = 32768;  // a thread is worth waking for about 20 us
constexpr int64_t kGradientRows = 256;     // rows whose weight gradients are summed together

int64_t grain_rows(int64_t width) { return std::max<int64_t>(1, kGrainElements / std::max<int64_t>(1, width)); }

void norm_forward(const RmsNorm& norm, int64_t begin, int64_t end, float* y, float* inverse) {
  AREAL_ISA_DISPATCH(rms_norm_forward_rows(norm, begin, end, y, inverse));
}
void norm_backward(const RmsNorm& norm, int64_t begin, int64_t end, const float* inverse, const float* grad_y,
                   float* grad_x, float* grad_weight) {
  AREAL_ISA_DISPATCH(rms_norm_backward_rows(norm, begin, end, inverse, grad_y, grad_x, grad_weight));
}
void gated_forward(const float* gate_up, int64_t begin, int64_t end, int64_t inner, float* y) {
  AREAL_ISA_DISPATCH(swiglu_forward_rows(gate_up, begin, end, inner, y));
}
void gated_backward(const float* gate_up, const float* grad_y, int64_t begin, int64_t end, int64_t inner,
                    float* grad_gate_up) {
  AREAL_ISA_DISPATCH(swiglu_backward_rows(gate_up, grad_y, begin, end, inner, grad_gate_up));
}

}  // namespace

void rms_norm_forward(const RmsNorm& norm, float* y, float* inverse) {
  parallel_for(0, norm.rows, grain_rows(norm.width),
               [&](int64_t begin, int64_t end) { norm_forward(norm, begin, end, y, inverse); });
}

void rms_norm_backward(const RmsNorm& norm, const float* inverse, const float* grad_y, float* grad_x,
                       float* grad_weight) {
  // Chunks of rows fixed by the shape, each with its own sum, added in order: the threads do not show.
  const int64_t chunks = (norm.rows + kGradientRows - 1) / kGradientRows;
  std::vector<float> sums(static_cast<size_t>(chunks * norm.width), 0.0f);
  parallel_for(0, chunks, std::max<int64_t>(1, grain_rows(norm.width) / kGradientRows),
               [&](int64_t first, int64_t last) {
                 for (int64_t chunk = first; chunk < last; ++chunk) {
                   const int64_t begin = chunk * kGradientRows, end = std::min(norm.rows, begin + kGradientRows);
                   norm_backward(norm, begin, end, inverse, grad_y, grad_x, sums.data() + chunk * norm.width);
                 }
               });
  std::fill_n(grad_weight, norm.width, 0.0f);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    for (int64_t i = 0; i < norm.width; ++i) grad_weight[i] += sums[static_cast<size_t>(chunk * norm.width + i)];
  }
}

void swiglu_forward(const float* gate_up, int64_t rows, int64_t inner, float* y) {
  parallel_for(0, rows, grain_rows(2 * inner),
               [&](int64_t begin, int64_t end) { gated_forward(gate_up, begin, end, inner, y); });
}

void swiglu_backward(const float* gate_up, const float* grad_y, int64_t rows, int64_t inner, float* grad_gate_up) {
  parallel_for(0, rows, grain_rows(2 * inner),
               [&](int64_t begin, int64_t end) { gated_backward(gate_up, grad_y, begin, end, inner, grad_gate_up); });
}

}  // namespace areal::layers
