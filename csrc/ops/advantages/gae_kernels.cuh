// GAE kernel: a block of kWarps warps scans one sequence from its end, tile by tile, and carries B (gae.h) between
// tiles. Lane 0 of a row of 32 tokens holds the last of them, so that the scan over time runs up the lanes.
#pragma once

#include "cuda/bounded_segments.cuh"
#include "cuda/reduce.cuh"
#include "ops/advantages/gae.h"

namespace areal::cuda {
namespace {

using advantages::GaeArgs;

// Sequences up to this length are scanned by one warp, longer ones by kLongWarps.
constexpr int64_t kShortTokens = 1024;
constexpr int kLongWarps = 8;
constexpr int kGaeRows = 4;  // rows of 32 tokens that a warp has in flight

// B = mult * (B of the token after) + add, over one token or a run of them. Identity for a masked token.
template <class Real>
struct Affine {
  Real mult;
  Real add;
};

// First `after`, which is nearer the end of the sequence, then `before`.
template <class Real>
__device__ __forceinline__ Affine<Real> compose(const Affine<Real>& after, const Affine<Real>& before) {
  return {before.mult * after.mult, before.mult * after.add + before.add};
}

// Lane i gets the composition of lanes 0..i. Called by all 32 lanes.
template <class Real>
__device__ __forceinline__ Affine<Real> scan_lanes(Affine<Real> x) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const Affine<Real> after = {__shfl_up_sync(kFullWarp, x.mult, step), __shfl_up_sync(kFullWarp, x.add, step)};
    if (lane >= step) x = compose(after, x);
  }
  return x;
}

// A warp's tokens of a tile.
template <class Real>
struct WarpTile {
  Real reward[kGaeRows];
  Real value[kGaeRows];
  bool live[kGaeRows];
  Affine<Real> from_end[kGaeRows];  // from the end of the warp's tokens to this one, inclusive
};

// The token of a row that the calling thread holds; rows count from the end of the warp's tokens.
template <int kWarps>
__device__ __forceinline__ int64_t token_of(int64_t tile_end, int row) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  return tile_end - 1 - (warp * kGaeRows + row) * kWarp - lane;
}

template <int kWarps, class Real>
__device__ __forceinline__ void load_tile(const GaeArgs<Real>& args, int64_t begin, int64_t tile_end,
                                          WarpTile<Real>& tile) {
#pragma unroll
  for (int row = 0; row < kGaeRows; ++row) {
    const int64_t t = token_of<kWarps>(tile_end, row);
    const bool inside = t >= begin;
    tile.live[row] = inside && (args.loss_mask == nullptr || args.loss_mask[t]);
    tile.reward[row] = inside && args.rewards != nullptr ? __ldg(args.rewards + t) : Real(0);
    tile.value[row] = inside && args.values != nullptr ? __ldg(args.values + t) : Real(0);
  }
}

// Fills from_end; returns the map over all tokens of the warp, in every lane.
template <class Real>
__device__ __forceinline__ Affine<Real> scan_tile(Real decay, Real value_weight, WarpTile<Real>& tile) {
  Affine<Real> whole = {Real(1), Real(0)};
#pragma unroll
  for (int row = 0; row < kGaeRows; ++row) {
    const Affine<Real> token = {decay, decay * tile.reward[row] + value_weight * tile.value[row]};
    const Affine<Real> scanned = scan_lanes(tile.live[row] ? token : Affine<Real>{Real(1), Real(0)});
    tile.from_end[row] = compose(whole, scanned);
    whole = {__shfl_sync(kFullWarp, tile.from_end[row].mult, kWarp - 1),
             __shfl_sync(kFullWarp, tile.from_end[row].add, kWarp - 1)};
  }
  return whole;
}

// carry: B of the token after the warp's last.
template <int kWarps, class Real>
__device__ __forceinline__ void store_tile(const GaeArgs<Real>& args, int64_t begin, int64_t tile_end, Real carry,
                                           bool failed, const WarpTile<Real>& tile) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  Real row_carry = carry;
#pragma unroll
  for (int row = 0; row < kGaeRows; ++row) {
    const Real b = tile.from_end[row].mult * carry + tile.from_end[row].add;
    const Real after = __shfl_up_sync(kFullWarp, b, 1);
    const Real total = tile.reward[row] + (lane == 0 ? row_carry : after);
    row_carry = __shfl_sync(kFullWarp, b, kWarp - 1);
    const int64_t t = token_of<kWarps>(tile_end, row);
    if (t < begin) continue;
    const bool zero = failed || !tile.live[row];
    args.returns[t] = zero ? Real(0) : total;
    if (args.advantages != nullptr) args.advantages[t] = zero ? Real(0) : total - tile.value[row];
  }
}

// Scans the sequences of its length class; the launch of the other class takes the rest. That of the short ones, which
// is never left out, also zeroes tokens of no sequence.
template <int kWarps, class Real>
__global__ void __launch_bounds__(kWarps* kWarp) gae_kernel(GaeArgs<Real> args, int64_t tokens) {
  constexpr int64_t kTileTokens = kWarps * kGaeRows * kWarp;
  __shared__ Affine<Real> maps[kWarps];
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const Real decay = static_cast<Real>(args.gamma * args.lam);
  const Real value_weight = static_cast<Real>(args.gamma * (1.0 - args.lam));
  if constexpr (kWarps == 1) {
    if (args.advantages != nullptr) zero_tail(args.segments, tokens, args.advantages);
    zero_tail(args.segments, tokens, args.returns);
  }
  for (int64_t s = blockIdx.x; s < args.segments.count; s += gridDim.x) {
    const auto [begin, end] = sequence_range(args.segments, s, tokens);
    if ((end - begin <= kShortTokens) != (kWarps == 1)) continue;
    Real carry = args.terminal != nullptr ? static_cast<Real>(args.terminal[s]) : Real(0);
    const bool failed = carry != carry;
    for (int64_t tile_end = end; tile_end > begin; tile_end -= kTileTokens) {
      WarpTile<Real> tile;
      load_tile<kWarps>(args, begin, tile_end, tile);
      const Affine<Real> whole = scan_tile(decay, value_weight, tile);
      if (lane == 0) maps[warp] = whole;
      __syncthreads();
      Real warp_carry = carry;
      for (int w = 0; w < kWarps; ++w) {
        if (w == warp) warp_carry = carry;
        carry = maps[w].mult * carry + maps[w].add;
      }
      __syncthreads();  // maps is free for the next tile
      store_tile<kWarps>(args, begin, tile_end, warp_carry, failed, tile);
    }
  }
}

}  // namespace
}  // namespace areal::cuda
