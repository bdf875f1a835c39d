// Packing and multiplication by packed weights: register tiles of up to 6 rows by one panel (6 x 64 floats of
// accumulators on AVX-512, 6 x 16 on AVX2, 6 x 8 at the baseline), and for 1 or 2 rows several panels at once, so
// that enough independent chains are in flight to hide the latency of the adds.
#include "base/simd.h"
#include "decode/kernels_cpu.h"

namespace areal::AREAL_ISA {

using decode::GemmArgs;
using decode::GemmEnd;
using decode::GemmStart;
using decode::PackArgs;

namespace {

constexpr int kTileRows = 6;
constexpr int kPanelVecs = kLanes == 16 ? 4 : 2;
constexpr int kPanel = kPanelVecs * kLanes;
// Rows whose activations should stay in the second-level cache while all panels pass by.
constexpr int64_t kBlockRows = 96;
// Panels of a matrix larger than kCached bytes come from memory; the first tile to read one asks for them kAhead bytes
// early (83 MB of bf16 weights, one row: 8.0 -> 6.5 ms; Sapphire Rapids, shared, 2026-11).
constexpr int64_t kCached = 1 << 20, kAhead = 4096;

AREAL_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

AREAL_INLINE VecF silu(VecF x) { return x / (splat(1.0f) + exp(min(splat(88.0f), -x))); }

struct Tile {
  const float* a;
  int64_t lda, k;
  const float* bias;
  float* c;  // of the first column of the tile, in output columns
  int64_t ldc;
  GemmStart start;
};

// Rows x (Panels adjacent panels of Vecs vectors).
template <int Rows, int Panels, int Vecs, GemmEnd End, bool Stream, class W>
AREAL_INLINE void run_tile(const Tile& t, const W* b) {
  VecF acc[Rows][Panels * Vecs];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
    for (int j = 0; j < Panels * Vecs; ++j) {
      acc[r][j] = t.start == GemmStart::kZero   ? splat(0.0f)
                  : t.start == GemmStart::kBias ? load(t.bias + j * kLanes)
                                                : load(t.c + r * t.ldc + j * kLanes);
    }
  }
  const int64_t panel_size = t.k * Vecs * kLanes;
  for (int64_t k = 0; k < t.k; ++k) {
    if constexpr (Stream) {
      constexpr int64_t kLine = 64 / sizeof(W);
#pragma GCC unroll 8
      for (int p = 0; p < Panels; ++p) {
#pragma GCC unroll 8
        for (int64_t j = 0; j < Vecs * kLanes; j += kLine)
          __builtin_prefetch(b + p * panel_size + k * Vecs * kLanes + j + kAhead / sizeof(W));
      }
    }
    VecF w[Panels * Vecs];
#pragma GCC unroll 8
    for (int j = 0; j < Panels * Vecs; ++j) w[j] = load(b + (j / Vecs) * panel_size + (k * Vecs + j % Vecs) * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const VecF x = splat(t.a[r * t.lda + k]);
#pragma GCC unroll 8
      for (int j = 0; j < Panels * Vecs; ++j) acc[r][j] = fma(x, w[j], acc[r][j]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
    if constexpr (End == GemmEnd::kSwiGlu) {
#pragma GCC unroll 8
      for (int j = 0; j < Panels * Vecs / 2; ++j)
        store(t.c + r * t.ldc + j * kLanes, silu(acc[r][2 * j]) * acc[r][2 * j + 1]);
    } else {
#pragma GCC unroll 8
      for (int j = 0; j < Panels * Vecs; ++j) store(t.c + r * t.ldc + j * kLanes, acc[r][j]);
    }
  }
}

template <int Panels, int Vecs, GemmEnd End, bool Stream, class W>
AREAL_INLINE void run_rows(const Tile& t, int64_t rows, const W* b) {
  if (rows == 1) return run_tile<1, Panels, Vecs, End, Stream>(t, b);
  if (rows == 2) return run_tile<2, Panels, Vecs, End, Stream>(t, b);
  if constexpr (Panels == 1) {
    if (rows == 3) return run_tile<3, 1, Vecs, End, Stream>(t, b);
    if (rows == 4) return run_tile<4, 1, Vecs, End, Stream>(t, b);
    if (rows == 5) return run_tile<5, 1, Vecs, End, Stream>(t, b);
    run_tile<6, 1, Vecs, End, Stream>(t, b);
  }
}

// All rows of a block against one panel (Panels panels when there are 1 or 2 rows), split into even tiles.
template <int Panels, int Vecs, GemmEnd End, class W>
void run_panel(Tile t, int64_t rows, const W* b, bool stream) {
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t count = rows / tiles + (i < rows % tiles ? 1 : 0);
    if (i == 0 && stream && Vecs == kPanelVecs) {
      run_rows<Panels, Vecs, End, true>(t, count, b);
    } else {
      run_rows<Panels, Vecs, End, false>(t, count, b);
    }
    t.a += count * t.lda;
    t.c += count * t.ldc;
  }
}

template <GemmEnd End, class W>
AREAL_INLINE void run_block(const GemmArgs& g, int64_t row, int64_t rows) {
  constexpr int kShrink = End == GemmEnd::kSwiGlu ? 2 : 1;  // packed columns per output column
  const int64_t padded = (g.n + kLanes - 1) / kLanes * kLanes, end = smaller(g.panel_end * kPanel, padded);
  int64_t column = g.panel_begin * kPanel;
  const bool stream = g.n * g.k * static_cast<int64_t>(sizeof(W)) > kCached;
  while (column < end) {
    const W* b = static_cast<const W*>(g.panels) + column * g.k;
    const float* bias = g.bias == nullptr ? nullptr : g.bias + column;
    const Tile t{g.a + row * g.lda, g.lda, g.k, bias, g.c + row * g.ldc + column / kShrink, g.ldc, g.start};
    const int64_t left = end - column;
    if (rows <= 2 && left >= 2 * kPanel) {
      run_panel<2, kPanelVecs, End>(t, rows, b, stream);
      column += 2 * kPanel;
      continue;
    }
    const int64_t vecs = smaller(left, kPanel) / kLanes;
    if (vecs == kPanelVecs) {
      run_panel<1, kPanelVecs, End>(t, rows, b, stream);
    } else if (vecs == 2) {
      run_panel<1, 2, End>(t, rows, b, stream);
    } else if constexpr (End == GemmEnd::kStore) {
      if (vecs == 1) run_panel<1, 1, End>(t, rows, b, stream);
      if constexpr (kPanelVecs > 3) {
        if (vecs == 3) run_panel<1, 3, End>(t, rows, b, stream);
      }
    }
    column += vecs * kLanes;
  }
}

template <GemmEnd End, class W>
AREAL_INLINE void run_blocks(const GemmArgs& g) {
  for (int64_t row = 0; row < g.rows; row += kBlockRows) run_block<End, W>(g, row, smaller(kBlockRows, g.rows - row));
}

AREAL_INLINE void convert(float x, float* out) { *out = x; }
AREAL_INLINE void convert(BFloat16 x, float* out) { *out = to_float(x); }
AREAL_INLINE void convert(BFloat16 x, BFloat16* out) { *out = x; }

// Up to 16 source rows become adjacent columns at `out`, whose rows of k are `width` apart: 16 streams to read, and a
// cache line to write at each k.
template <class In, class Out>
AREAL_INLINE void transpose(const In* source, int64_t count, int64_t k, Out* out, int64_t width) {
  constexpr int64_t kBlock = 16;
  int64_t i = 0;
  for (; i + kBlock <= k; i += kBlock) {
    for (int64_t d = 0; d < kBlock; ++d) __builtin_prefetch(out + (i + 2 * kBlock + d) * width, 1);  // to write
    for (int64_t j = 0; j < count; ++j) {
#pragma GCC unroll 16
      for (int64_t d = 0; d < kBlock; ++d) convert(source[j * k + i + d], out + (i + d) * width + j);
    }
  }
  for (; i < k; ++i)
    for (int64_t j = 0; j < count; ++j) convert(source[j * k + i], out + i * width + j);
}

template <class In, class Out>
void pack_rows(const PackArgs& p) {
  const int64_t padded = (p.n + kLanes - 1) / kLanes * kLanes, group = p.column_stride > 1 ? kLanes : 16;
  for (int64_t j = 0; j < p.rows;) {
    const int64_t column = p.column_stride > 1 ? (p.column_begin + j / kLanes * p.column_stride) * kLanes + j % kLanes
                                               : p.column_begin + j;
    const int64_t panel = column / kPanel * kPanel, width = smaller(kPanel, padded - panel);
    const int64_t count = smaller(smaller(group - column % group, panel + width - column), p.rows - j);
    transpose(static_cast<const In*>(p.source) + j * p.k, count, p.k,
              static_cast<Out*>(p.panels) + panel * p.k + (column - panel), width);
    j += count;
  }
}

}  // namespace

const int64_t kDecodePanelColumns = kPanel;

void decode_pack(const PackArgs& p) {
  if (p.source_dtype == DType::kFloat32) return pack_rows<float, float>(p);
  if (p.panel_dtype == DType::kFloat32) return pack_rows<BFloat16, float>(p);
  pack_rows<BFloat16, BFloat16>(p);
}

void decode_gemm(const GemmArgs& g) {
  const bool wide = g.panel_dtype == DType::kFloat32, swiglu = g.end == GemmEnd::kSwiGlu;
  if (wide && swiglu) return run_blocks<GemmEnd::kSwiGlu, float>(g);
  if (wide) return run_blocks<GemmEnd::kStore, float>(g);
  if (swiglu) return run_blocks<GemmEnd::kSwiGlu, BFloat16>(g);
  run_blocks<GemmEnd::kStore, BFloat16>(g);
}

}  // namespace areal::AREAL_ISA
