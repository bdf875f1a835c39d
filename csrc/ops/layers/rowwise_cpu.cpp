#include "ops/layers/rowwise_cpu.h"

#include <cmath>

#include "ops/layers/vector_tail.h"

namespace areal::AREAL_ISA {
namespace {

// 1 / (1 + e^-x). Below -88 the true value is under 1e-38, here it is that of -88.
AREAL_INLINE VecF sigmoid(VecF x) { return splat(1.0f) / (splat(1.0f) + exp(min(splat(88.0f), -x))); }

}  // namespace

void rms_norm_forward_rows(const layers::RmsNorm& norm, int64_t begin, int64_t end, float* y, float* inverse) {
  const int64_t width = norm.width;
  for (int64_t row = begin; row < end; ++row) {
    const float* x = norm.x + row * width;
    VecF squares{};
    for_each_vector(width, [&](int64_t i, int64_t count) {
      const VecF v = load_some(x + i, count);
      squares = fma(v, v, squares);
    });
    const float r = 1.0f / std::sqrt(reduce_add(squares) / static_cast<float>(width) + norm.eps);
    for_each_vector(width, [&](int64_t i, int64_t count) {
      const VecF v = load_some(x + i, count) * r;
      store_some(y + row * width + i, v * load_some(norm.weight + i, count), count);
    });
    inverse[row] = r;
  }
}

void rms_norm_backward_rows(const layers::RmsNorm& norm, int64_t begin, int64_t end, const float* inverse,
                            const float* grad_y, float* grad_x, float* grad_weight) {
  const int64_t width = norm.width;
  for (int64_t row = begin; row < end; ++row) {
    const float* x = norm.x + row * width;
    const float* upstream = grad_y + row * width;
    const float r = inverse[row];
    VecF products{};
    for_each_vector(width, [&](int64_t i, int64_t count) {
      const VecF xr = load_some(x + i, count) * r, up = load_some(upstream + i, count);
      products = fma(up * load_some(norm.weight + i, count), xr, products);
      store_some(grad_weight + i, fma(up, xr, load_some(grad_weight + i, count)), count);
    });
    const float pull = reduce_add(products) / static_cast<float>(width);  // mean(g x) r
    float* out = grad_x + row * width;
    for_each_vector(width, [&](int64_t i, int64_t count) {
      const VecF g = load_some(upstream + i, count) * load_some(norm.weight + i, count);
      const VecF change = g - load_some(x + i, count) * (r * pull);
      store_some(out + i, fma(change, splat(r), load_some(out + i, count)), count);
    });
  }
}

void swiglu_forward_rows(const float* gate_up, int64_t begin, int64_t end, int64_t inner, float* y) {
  for (int64_t row = begin; row < end; ++row) {
    const float* gates = gate_up + row * 2 * inner;
    for_each_vector(inner, [&](int64_t i, int64_t count) {
      const VecF g = load_some(gates + i, count);
      store_some(y + row * inner + i, g * sigmoid(g) * load_some(gates + inner + i, count), count);
    });
  }
}

void swiglu_backward_rows(const float* gate_up, const float* grad_y, int64_t begin, int64_t end, int64_t inner,
                          float* grad_gate_up) {
  for (int64_t row = begin; row < end; ++row) {
    const float* gates = gate_up + row * 2 * inner;
    float* out = grad_gate_up + row * 2 * inner;
    for_each_vector(inner, [&](int64_t i, int64_t count) {
      const VecF g = load_some(gates + i, count), up = load_some(gates + inner + i, count);
      const VecF s = sigmoid(g), scaled = load_some(grad_y + row * inner + i, count) * s;
      store_some(out + i, scaled * up * fma(g, splat(1.0f) - s, splat(1.0f)), count);
      store_some(out + inner + i, scaled * g, count);
    });
  }
}

}  // namespace areal::AREAL_ISA
