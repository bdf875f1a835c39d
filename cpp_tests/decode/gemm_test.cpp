#include <bit>
#include <cmath>

#include "kernel_test.h"

namespace areal::decode {
namespace {

class GemmTest : public KernelTest {
 protected:
  struct Problem {
    int64_t rows, n, k;
    std::vector<float> a, weight, bias, c;  // a, bias and c padded
    Buffer<float> panels;
    std::vector<uint16_t> half_weight;
    Buffer<uint16_t> half_panels;
  };

  // With `half`, the weights are bf16 and `weight` holds their values.
  Problem make(int64_t rows, int64_t n, int64_t k, bool half) {
    Problem p{rows, n, k, pad_rows(random(rows * k), k), random(n * k), pad_rows(random(n), n), {}, {}, {}, {}};
    p.c = pad_rows(random(rows * n), n);
    const int64_t elements = round_up(n, kernels().lanes) * k;
    p.panels = Buffer<float>(elements);
    p.half_panels = Buffer<uint16_t>(elements);
    std::fill_n(p.panels.data(), elements, 0.0f);
    std::fill_n(p.half_panels.data(), elements, uint16_t{0});
    if (half) {
      for (float& w : p.weight) {
        p.half_weight.push_back(static_cast<uint16_t>(std::bit_cast<uint32_t>(w) >> 16));
        w = std::bit_cast<float>(uint32_t{p.half_weight.back()} << 16);
      }
      kernels().pack({p.half_weight.data(), DType::kBFloat16, n, k, p.half_panels.data(), DType::kBFloat16, n, 0, 1});
    } else {
      kernels().pack({p.weight.data(), DType::kFloat32, n, k, p.panels.data(), DType::kFloat32, n, 0, 1});
    }
    return p;
  }

  int64_t panels(int64_t n) { return (n + kernels().panel_columns - 1) / kernels().panel_columns; }

  std::vector<float> run(const Problem& p, GemmStart start, int64_t row, int64_t rows) {
    const int64_t lda = round_up(p.k, kPad), ldc = round_up(p.n, kPad);
    std::vector<float> c(p.c.begin() + row * ldc, p.c.begin() + (row + rows) * ldc);
    const bool half = !p.half_weight.empty();
    const void* data = half ? static_cast<const void*>(p.half_panels.data()) : p.panels.data();
    kernels().gemm({p.a.data() + row * lda, lda, rows, p.k, data, half ? DType::kBFloat16 : DType::kFloat32, p.n, 0,
                    panels(p.n), p.bias.data(), c.data(), ldc, start, GemmEnd::kStore});
    return c;
  }

  void check(const Problem& p, GemmStart start) {
    const int64_t lda = round_up(p.k, kPad), ldc = round_up(p.n, kPad);
    const std::vector<float> c = run(p, start, 0, p.rows);
    for (int64_t i = 0; i < p.rows; ++i) {
      for (int64_t j = 0; j < ldc; ++j) {
        double expected = 0.0, size = 0.0;
        if (start == GemmStart::kBias) expected = p.bias[static_cast<size_t>(j)];
        if (start == GemmStart::kAdd) expected = p.c[static_cast<size_t>(i * ldc + j)];
        size = std::fabs(expected);
        for (int64_t k = 0; k < p.k && j < p.n; ++k) {
          const double term = static_cast<double>(p.a[static_cast<size_t>(i * lda + k)]) *
                              static_cast<double>(p.weight[static_cast<size_t>(j * p.k + k)]);
          expected += term;
          size += std::fabs(term);
        }
        const double error = std::fabs(static_cast<double>(c[static_cast<size_t>(i * ldc + j)]) - expected);
        const double bound = 6e-8 * static_cast<double>(p.k + 1) * size;
        // Columns past the last vector are not written.
        const bool written = j < round_up(p.n, kernels().lanes);
        ASSERT_FALSE(written && !(error <= bound)) << "row " << i << " column " << j << " of " << p.rows << "x" << p.n
                                                   << ", k " << p.k << ": error " << error << " > " << bound;
      }
    }
  }
};

TEST_P(GemmTest, EveryNumberOfColumns) {
  for (int64_t n = 1; n <= 2 * kernels().panel_columns + kernels().lanes + 1; ++n)
    for (const bool half : {false, true})
      for (const int64_t rows : {1, 2, 5}) check(make(rows, n, 5, half), GemmStart::kZero);
}

TEST_P(GemmTest, EveryNumberOfRows) {
  for (int64_t rows = 1; rows <= 27; ++rows)
    for (const bool half : {false, true})
      for (const int64_t n : {3, 16, 70, 128, 200}) check(make(rows, n, 7, half), GemmStart::kAdd);
  check(make(200, 65, 9, false), GemmStart::kAdd);
}

TEST_P(GemmTest, EveryDepth) {
  for (int64_t k = 1; k <= 36; ++k)
    for (const bool half : {false, true})
      for (const int64_t rows : {1, 4}) check(make(rows, 33, k, half), GemmStart::kBias);
  check(make(7, 257, 1031, false), GemmStart::kBias);
}

TEST_P(GemmTest, MatricesBeyondTheCache) {
  for (const bool half : {false, true})
    for (const int64_t rows : {1, 9}) check(make(rows, 517, 1040, half), GemmStart::kAdd);
}

TEST_P(GemmTest, RowsDontDependOnTheBatch) {
  for (const bool half : {false, true}) {
    for (const int64_t n : {5, 64, 130, 250}) {
      const Problem p = make(23, n, 37, half);
      const int64_t ldc = round_up(n, kPad);
      for (const GemmStart start : {GemmStart::kZero, GemmStart::kBias, GemmStart::kAdd}) {
        const std::vector<float> whole = run(p, start, 0, p.rows);
        for (int64_t rows = 1; rows <= 8; ++rows) {
          for (int64_t row = 0; row + rows <= p.rows; row += rows) {
            const std::vector<float> part = run(p, start, row, rows);
            ASSERT_EQ(std::memcmp(part.data(), whole.data() + row * ldc, part.size() * sizeof(float)), 0)
                << rows << " rows from " << row << ", n " << n;
          }
        }
      }
    }
  }
}

TEST_P(GemmTest, PanelsCanBeComputedApart) {
  const Problem p = make(4, 300, 11, false);
  const int64_t lda = round_up(p.k, kPad), ldc = round_up(p.n, kPad);
  const std::vector<float> whole = run(p, GemmStart::kAdd, 0, 4);
  std::vector<float> c = p.c;
  for (int64_t panel = panels(p.n); panel-- > 0;) {
    kernels().gemm({p.a.data(), lda, 4, p.k, p.panels.data(), DType::kFloat32, p.n, panel, panel + 1, nullptr, c.data(),
                    ldc, GemmStart::kAdd, GemmEnd::kStore});
  }
  EXPECT_EQ(c, whole);
}

TEST_P(GemmTest, PartsPackSideBySide) {
  for (const int64_t first : {1, 16, 40, 70}) {
    const int64_t n = first + 45, k = 19;
    const Problem p = make(3, n, k, false);
    Problem parts = make(3, n, k, false);
    parts.a = p.a;
    std::fill_n(parts.panels.data(), parts.panels.size(), 0.0f);
    kernels().pack({p.weight.data(), DType::kFloat32, first, k, parts.panels.data(), DType::kFloat32, n, 0, 1});
    kernels().pack(
        {p.weight.data() + first * k, DType::kFloat32, 45, k, parts.panels.data(), DType::kFloat32, n, first, 1});
    EXPECT_EQ(run(parts, GemmStart::kZero, 0, 3), run(p, GemmStart::kZero, 0, 3));
  }
}

TEST_P(GemmTest, SwiGluOfInterleavedGateAndUp) {
  for (const int64_t size : {1, 7, 8, 16, 17, 40, 64, 100}) {
    for (const int64_t rows : {1, 2, 3, 8}) {
      const int64_t k = 13, lanes = kernels().lanes, n = 2 * round_up(size, lanes), ldc = round_up(size, kPad);
      const std::vector<float> gate = random(size * k, 3.0f), up = random(size * k), a = pad_rows(random(rows * k), k);
      Buffer<float> panels(n * k);
      std::fill_n(panels.data(), n * k, 0.0f);
      kernels().pack({gate.data(), DType::kFloat32, size, k, panels.data(), DType::kFloat32, n, 0, 2});
      kernels().pack({up.data(), DType::kFloat32, size, k, panels.data(), DType::kFloat32, n, 1, 2});
      std::vector<float> c(static_cast<size_t>(rows * ldc));
      kernels().gemm({a.data(), kPad, rows, k, panels.data(), DType::kFloat32, n, 0, this->panels(n), nullptr, c.data(),
                      ldc, GemmStart::kZero, GemmEnd::kSwiGlu});
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < size; ++j) {
          double g = 0.0, u = 0.0;
          for (int64_t d = 0; d < k; ++d) {
            const double x = a[static_cast<size_t>(i * kPad + d)];
            g += x * static_cast<double>(gate[static_cast<size_t>(j * k + d)]);
            u += x * static_cast<double>(up[static_cast<size_t>(j * k + d)]);
          }
          const double expected = g / (1.0 + std::exp(-g)) * u;
          EXPECT_NEAR(c[static_cast<size_t>(i * ldc + j)], expected, 1e-5 * (1.0 + std::fabs(g * u)));
        }
      }
    }
  }
}

AREAL_ALL_ISAS(GemmTest);

}  // namespace
}  // namespace areal::decode
