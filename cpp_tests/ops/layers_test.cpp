// The layers of a decoder against plain double-precision loops: every instruction set, every tail, any split of the
// work over threads. Gradients are checked against central differences of those loops.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/isa.h"
#include "base/threads.h"
#include "ops/layers/attention.h"
#include "ops/layers/rowwise.h"

namespace areal::layers {
namespace {

using Floats = std::vector<float>;
using Doubles = std::vector<double>;

Floats random_floats(int64_t count, uint32_t seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  Floats values(static_cast<size_t>(count));
  for (float& value : values) value = normal(engine);
  return values;
}

Doubles widen(const Floats& values) { return {values.begin(), values.end()}; }

void expect_close(const Floats& found, const Doubles& expected, double tolerance, const std::string& what) {
  ASSERT_EQ(found.size(), expected.size()) << what;
  double largest = 1.0;
  for (const double value : expected) largest = std::max(largest, std::abs(value));
  for (size_t i = 0; i < found.size(); ++i) {
    if (!(std::abs(found[i] - expected[i]) <= tolerance * largest)) {
      FAIL() << what << ": entry " << i << ": expected " << expected[i] << ", got " << found[i];
    }
  }
}

double dot(const Doubles& a, const Floats& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// d(fn(x) . upstream) / dx by central differences.
Doubles slope(const std::function<Doubles(const Doubles&)>& fn, const Doubles& x, const Floats& upstream) {
  Doubles out(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    Doubles up = x, down = x;
    up[i] += 1e-5;
    down[i] -= 1e-5;
    out[i] = (dot(fn(up), upstream) - dot(fn(down), upstream)) / 2e-5;
  }
  return out;
}

void on_every_isa(const std::function<void()>& test) {
  for (const Isa isa : {Isa::kBaseline, Isa::kAvx2, Isa::kAvx512}) {
    if (isa > best_isa()) continue;
    SCOPED_TRACE(isa_name(isa));
    set_active_isa(isa);
    test();
  }
  set_active_isa(best_isa());
}

Doubles plain_norm(const Doubles& x, const Doubles& weight, double eps) {
  const size_t width = weight.size();
  Doubles y(x.size());
  for (size_t row = 0; row * width < x.size(); ++row) {
    double squares = 0;
    for (size_t i = 0; i < width; ++i) squares += x[row * width + i] * x[row * width + i];
    const double r = 1 / std::sqrt(squares / static_cast<double>(width) + eps);
    for (size_t i = 0; i < width; ++i) y[row * width + i] = x[row * width + i] * r * weight[i];
  }
  return y;
}

TEST(RmsNorm, EveryTail) {
  on_every_isa([] {
    for (int64_t width = 1; width <= 40; ++width) {
      const int64_t rows = 3;
      const Floats x = random_floats(rows * width, 1), weight = random_floats(width, 2);
      const Floats upstream = random_floats(rows * width, 3), residual = random_floats(rows * width, 4);
      const RmsNorm norm{x.data(), weight.data(), rows, width, 1e-3f};
      Floats y(x.size()), inverse(rows), grad_x = residual, grad_weight(static_cast<size_t>(width), NAN);
      rms_norm_forward(norm, y.data(), inverse.data());
      rms_norm_backward(norm, inverse.data(), upstream.data(), grad_x.data(), grad_weight.data());

      const Doubles dx = widen(x), dw = widen(weight);
      const std::string what = "width " + std::to_string(width);
      expect_close(y, plain_norm(dx, dw, 1e-3f), 1e-6, what);
      Doubles of_x = slope([&](const Doubles& v) { return plain_norm(v, dw, 1e-3f); }, dx, upstream);
      for (size_t i = 0; i < of_x.size(); ++i) of_x[i] += residual[i];
      expect_close(grad_x, of_x, 1e-5, what + ", x");
      expect_close(grad_weight, slope([&](const Doubles& v) { return plain_norm(dx, v, 1e-3f); }, dw, upstream), 1e-5,
                   what + ", weight");
    }
  });
}

Doubles plain_swiglu(const Doubles& gate_up, size_t inner) {
  Doubles y(gate_up.size() / 2);
  for (size_t row = 0; row < y.size() / inner; ++row) {
    for (size_t i = 0; i < inner; ++i) {
      const double gate = gate_up[row * 2 * inner + i], up = gate_up[row * 2 * inner + inner + i];
      y[row * inner + i] = gate / (1 + std::exp(-gate)) * up;
    }
  }
  return y;
}

TEST(SwiGlu, EveryTail) {
  on_every_isa([] {
    for (int64_t inner = 1; inner <= 40; ++inner) {
      const int64_t rows = 2;
      Floats gate_up = random_floats(rows * 2 * inner, 5);
      for (float& value : gate_up) value *= 4;
      const Floats upstream = random_floats(rows * inner, 6);
      Floats y(upstream.size()), grad(gate_up.size());
      swiglu_forward(gate_up.data(), rows, inner, y.data());
      swiglu_backward(gate_up.data(), upstream.data(), rows, inner, grad.data());
      const auto plain = [inner](const Doubles& v) { return plain_swiglu(v, static_cast<size_t>(inner)); };
      expect_close(y, plain(widen(gate_up)), 1e-6, "forward");
      expect_close(grad, slope(plain, widen(gate_up), upstream), 1e-5, "backward");
    }
  });
}

TEST(SwiGlu, GatesBeyondTheRangeOfExp) {
  on_every_isa([] {
    const Floats gate_up{-1e4f, -200, -90, 90, 200, 1e4f, 1, 1, 1, 1, 1, 1}, upstream(6, 1.0f);
    Floats y(6), grad(12);
    swiglu_forward(gate_up.data(), 1, 6, y.data());
    swiglu_backward(gate_up.data(), upstream.data(), 1, 6, grad.data());
    expect_close(y, {0, 0, 0, 90, 200, 1e4}, 1e-6, "forward");
    expect_close(grad, {0, 0, 0, 1, 1, 1, 0, 0, 0, 90, 200, 1e4}, 1e-6, "backward");
  });
}

// A packed batch; groups of more than one sequence share their first as a prefix.
struct Batch {
  std::vector<int64_t> cu_seqlens, cu_groups;
  int64_t heads, kv_heads, head_dim;
  Floats table;

  Batch(const std::vector<std::vector<int64_t>>& groups, int64_t heads, int64_t kv_heads, int64_t head_dim)
      : cu_seqlens{0}, cu_groups{0}, heads(heads), kv_heads(kv_heads), head_dim(head_dim) {
    for (const auto& group : groups) {
      for (const int64_t length : group) cu_seqlens.push_back(cu_seqlens.back() + length);
      cu_groups.push_back(static_cast<int64_t>(cu_seqlens.size()) - 1);
    }
    for (int64_t position = 0; position < 128; ++position) {
      const auto angle = [&](int64_t i) {
        return static_cast<float>(position) / std::pow(10.0f, static_cast<float>(i));
      };
      for (int64_t i = 0; i < head_dim / 2; ++i) table.push_back(std::cos(angle(i)));
      for (int64_t i = 0; i < head_dim / 2; ++i) table.push_back(std::sin(angle(i)));
    }
  }

  int64_t tokens() const { return cu_seqlens.back(); }
  Attention attention() const {
    Attention a;
    a.sequences = {cu_seqlens.data(), static_cast<int64_t>(cu_seqlens.size()) - 1};
    a.cu_groups = cu_groups.data();
    a.groups = static_cast<int64_t>(cu_groups.size()) - 1;
    a.heads = heads;
    a.kv_heads = kv_heads;
    a.head_dim = head_dim;
    a.table = table.data();
    a.positions = 128;
    return a;
  }
};

// The tokens that each token sees, itself last.
std::vector<std::vector<int64_t>> visible_tokens(const Batch& b) {
  std::vector<std::vector<int64_t>> visible(static_cast<size_t>(b.tokens()));
  for (size_t g = 0; g + 1 < b.cu_groups.size(); ++g) {
    for (int64_t s = b.cu_groups[g]; s < b.cu_groups[g + 1]; ++s) {
      std::vector<int64_t> seen;
      const auto append = [&](int64_t sequence) {
        for (int64_t t = b.cu_seqlens[sequence]; t < b.cu_seqlens[sequence + 1]; ++t) {
          seen.push_back(t);
          if (sequence == s) visible[t] = seen;
        }
      };
      if (s != b.cu_groups[g]) append(b.cu_groups[g]);
      append(s);
    }
  }
  return visible;
}

Doubles plain_attention(const Batch& b, const Doubles& qkv) {
  const int64_t width = (b.heads + 2 * b.kv_heads) * b.head_dim, half = b.head_dim / 2;
  const auto visible = visible_tokens(b);
  const auto turned = [&](int64_t token, int64_t head, int64_t d) {
    const double* x = &qkv[token * width + head * b.head_dim];
    const float* angles = &b.table[(visible[token].size() - 1) * b.head_dim];
    const int64_t i = d % half;
    return d < half ? x[i] * angles[i] - x[i + half] * angles[half + i] : x[d] * angles[i] + x[i] * angles[half + i];
  };
  Doubles out(static_cast<size_t>(b.tokens() * b.heads * b.head_dim), 0.0);
  for (int64_t token = 0; token < b.tokens(); ++token) {
    for (int64_t head = 0; head < b.heads; ++head) {
      const int64_t key = b.heads + head / (b.heads / b.kv_heads), value = key + b.kv_heads;
      Doubles weights;
      double total = 0;
      for (const int64_t seen : visible[token]) {
        double score = 0;
        for (int64_t d = 0; d < b.head_dim; ++d) score += turned(token, head, d) * turned(seen, key, d);
        weights.push_back(std::exp(score / std::sqrt(static_cast<double>(b.head_dim))));
        total += weights.back();
      }
      for (size_t j = 0; j < weights.size(); ++j) {
        for (int64_t d = 0; d < b.head_dim; ++d) {
          out[(token * b.heads + head) * b.head_dim + d] +=
              weights[j] / total * qkv[visible[token][j] * width + value * b.head_dim + d];
        }
      }
    }
  }
  return out;
}

struct Results {
  Floats turned, out, lse, grad;
};

Results run(const Batch& b, const Floats& qkv, const Floats& upstream) {
  Results r{qkv, Floats(upstream.size(), NAN), Floats(static_cast<size_t>(b.tokens() * b.heads), NAN),
            Floats(qkv.size(), NAN)};
  attention_forward(b.attention(), b.tokens(), r.turned.data(), r.out.data(), r.lse.data());
  attention_backward(b.attention(), b.tokens(), r.turned.data(), r.out.data(), r.lse.data(), upstream.data(),
                     r.grad.data());
  return r;
}

void check_attention(const Batch& b) {
  const Floats qkv = random_floats(b.tokens() * (b.heads + 2 * b.kv_heads) * b.head_dim, 7);
  const Floats upstream = random_floats(b.tokens() * b.heads * b.head_dim, 8);
  const Results found = run(b, qkv, upstream);
  const auto plain = [&](const Doubles& v) { return plain_attention(b, v); };
  expect_close(found.out, plain(widen(qkv)), 2e-6, "forward");
  expect_close(found.grad, slope(plain, widen(qkv), upstream), 1e-5, "backward");
}

TEST(Attention, HeadsAndDimensions) {
  on_every_isa([] {
    for (const int64_t head_dim : {2, 6, 16, 18, 34}) check_attention(Batch({{3}, {0}, {2}}, 2, 1, head_dim));
    check_attention(Batch({{4}, {1}}, 6, 2, 4));
    check_attention(Batch({{4}, {1}}, 3, 3, 4));
  });
}

TEST(Attention, SharedPrefixes) {
  on_every_isa([] {
    check_attention(Batch({{3, 2, 0, 5}, {1}, {0, 2}, {2, 1, 1}}, 2, 1, 4));
    check_attention(Batch({{0, 0}, {}, {6, 1}}, 1, 1, 6));
  });
}

TEST(Attention, EveryTailOfASequence) {
  on_every_isa([] {
    for (int64_t length = 1; length <= 70; ++length) {
      const Batch b({{length}, {3, length}}, 1, 1, 4);
      const Floats qkv = random_floats(b.tokens() * 12, 9);
      expect_close(run(b, qkv, random_floats(b.tokens() * 4, 10)).out, plain_attention(b, widen(qkv)), 2e-6,
                   "length " + std::to_string(length));
    }
  });
}

// Pools without threads, which still split the range, and run the pieces last to first.
template <int kThreads>
void split_backwards(int64_t begin, int64_t end, int64_t grain, RangeFn fn) {
  const int64_t piece = std::max(grain, (end - begin + kThreads - 1) / kThreads);
  for (int64_t i = (end - begin + piece - 1) / piece; i-- > 0;) {
    fn(begin + i * piece, std::min(end, begin + (i + 1) * piece));
  }
}

TEST(Layers, ResultsAreBitwiseTheSameForAnyNumberOfThreads) {
  const Batch b({{3, 2, 9}, {40}, {1, 1}, {20, 30, 4}}, 4, 2, 16);
  const Floats qkv = random_floats(b.tokens() * 128, 11), upstream = random_floats(b.tokens() * 64, 12);
  const Floats x = random_floats(2000 * 48, 13), weight = random_floats(48, 14);
  const auto everything = [&] {
    const Results r = run(b, qkv, upstream);
    Floats y(x.size()), inverse(2000), grad_x = x, grad_weight(48), gated(x.size() / 2), grad_gates(x.size());
    const RmsNorm norm{x.data(), weight.data(), 2000, 48, 1e-6f};
    rms_norm_forward(norm, y.data(), inverse.data());
    rms_norm_backward(norm, inverse.data(), x.data(), grad_x.data(), grad_weight.data());
    swiglu_forward(x.data(), 2000, 24, gated.data());
    swiglu_backward(x.data(), gated.data(), 2000, 24, grad_gates.data());
    return std::vector<Floats>{r.turned, r.out, r.lse, r.grad, y, inverse, grad_x, grad_weight, gated, grad_gates};
  };
  const std::vector<Floats> alone = everything();
  set_parallel_for(split_backwards<2>, [] { return int64_t{2}; });
  const std::vector<Floats> two = everything();
  set_parallel_for(split_backwards<16>, [] { return int64_t{16}; });
  const std::vector<Floats> sixteen = everything();
  set_parallel_for(nullptr, nullptr);
  EXPECT_EQ(alone, two);
  EXPECT_EQ(alone, sixteen);
}

void expect_refused(const Attention& attention, int64_t tokens, const std::string& text) {
  Floats qkv(1000), out(1000), lse(1000);
  try {
    attention_forward(attention, tokens, qkv.data(), out.data(), lse.data());
    FAIL() << "expected an error with: " << text;
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
  }
}

TEST(Attention, LayoutsThatDoNotFitAreRefused) {
  const Batch b({{3, 2}, {4}}, 2, 1, 4);
  expect_refused(b.attention(), 8, "expected cu_seqlens[-1] = 8 (number of packed tokens), got 9");
  Attention a = b.attention();
  a.positions = 4;
  expect_refused(a, 9, "expected a rotary table of at least 5 positions, got 4");
  a = b.attention();
  a.groups = 1;
  expect_refused(a, 9, "attention (cu_groups)");
  a = b.attention();
  a.kv_heads = 3;
  expect_refused(a, 9, "expected kv_heads to divide heads = 2, got 3");
  a = b.attention();
  a.head_dim = 3;
  expect_refused(a, 9, "expected an even head_dim, got 3");
}

}  // namespace
}  // namespace areal::layers
