// Correct kernels give right results, and no finding, in every build, order and seed.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <numeric>
#include <vector>

#include "cuda/launch.cuh"
#include "cuda_shim/orders.h"

namespace areal::cuda {
namespace {

constexpr unsigned kFull = 0xffffffffu;
constexpr int kSeeds = 8;

template <int kThreads>
__global__ void block_sum_kernel(const float* __restrict__ in, float* __restrict__ out, int n) {
  __shared__ float partial[kThreads / 32];
  float sum = 0.0f;
  for (int i = threadIdx.x; i < n; i += kThreads) sum += __ldg(in + blockIdx.x * static_cast<int64_t>(n) + i);
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) sum += __shfl_xor_sync(kFull, sum, d);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kThreads / 32; ++w) sum += partial[w];
    out[blockIdx.x] = sum;
  }
}

TEST(Intrinsics, ReduceABlockThroughSharedMemory) {
  std::vector<float> in(3 * 1000), out(3);
  std::iota(in.begin(), in.end(), 0.0f);
  cuda_shim::for_each_order(
      [&] {
        out.assign(3, 0.0f);
        AREAL_LAUNCH(block_sum_kernel<128>, 3, 128, 0, nullptr, in.data(), out.data(), 1000);
        for (int b = 0; b < 3; ++b) EXPECT_EQ(out[b], 1000.0f * (1000 * b) + 499500.0f);
      },
      kSeeds);
}

struct Exchanged {
  int shuffled, down, up, grouped_xor, ballot, any, all, add, max, min, or_, count, and_block, or_block;
};

__global__ void exchange_kernel(Exchanged* out) {
  const int t = threadIdx.x, lane = t & 31;
  Exchanged& e = out[t];
  e.shuffled = __shfl_sync(kFull, t, 5);
  e.down = __shfl_down_sync(kFull, t, 3);
  e.up = __shfl_up_sync(kFull, t, 3);
  e.grouped_xor = __shfl_xor_sync(kFull, t, 4, 8);
  e.ballot = static_cast<int>(__ballot_sync(kFull, lane < 7));
  e.any = __any_sync(kFull, lane == 31);
  e.all = __all_sync(kFull, lane < 31);
  e.add = __reduce_add_sync(kFull, lane - 16);
  e.max = __reduce_max_sync(kFull, lane - 16);
  e.min = __reduce_min_sync(kFull, lane - 16);
  e.or_ = static_cast<int>(__reduce_or_sync(kFull, 1u << lane & 0xf0u));
  e.count = __syncthreads_count(t % 3 == 0);
  e.and_block = __syncthreads_and(t < 63);
  e.or_block = __syncthreads_or(t == 63);
}

TEST(Intrinsics, ExchangeValuesAcrossTheWarp) {
  std::vector<Exchanged> out(64);
  cuda_shim::for_each_order(
      [&] {
        AREAL_LAUNCH(exchange_kernel, 1, 64, 0, nullptr, out.data());
        for (int t = 0; t < 64; ++t) {
          const Exchanged& e = out[t];
          const int lane = t & 31, base = t & ~31;
          EXPECT_EQ(e.shuffled, base + 5);
          EXPECT_EQ(e.down, lane + 3 < 32 ? t + 3 : t);
          EXPECT_EQ(e.up, lane >= 3 ? t - 3 : t);
          EXPECT_EQ(e.grouped_xor, t ^ 4);
          EXPECT_EQ(e.ballot, 0x7f);
          EXPECT_EQ(e.any, 1);
          EXPECT_EQ(e.all, 0);
          EXPECT_EQ(e.add, -16);
          EXPECT_EQ(e.max, 15);
          EXPECT_EQ(e.min, -16);
          EXPECT_EQ(e.or_, 0xf0);
          EXPECT_EQ(e.count, 22);
          EXPECT_EQ(e.and_block, 0);
          EXPECT_EQ(e.or_block, 1);
        }
      },
      kSeeds);
}

__global__ void sub_warp_kernel(double* out) {
  const unsigned lane = threadIdx.x & 31;
  double value = threadIdx.x;
  // Half warps go separate ways, and the second half returns early.
  if (lane < 16) {
    for (int d = 8; d > 0; d >>= 1) value += __shfl_xor_sync(0x0000ffffu, value, d, 16);
  } else {
    for (int d = 8; d > 0; d >>= 1) value *= __shfl_xor_sync(0xffff0000u, 1.0, d, 16);
    out[threadIdx.x] = value;
    return;
  }
  __syncwarp(0x0000ffffu);
  out[threadIdx.x] = value;
}

TEST(Intrinsics, MasksLetHalfWarpsDiverge) {
  std::vector<double> out(64);
  cuda_shim::for_each_order(
      [&] {
        AREAL_LAUNCH(sub_warp_kernel, 1, 64, 0, nullptr, out.data());
        for (int t = 0; t < 64; ++t) {
          EXPECT_EQ(out[t], (t & 31) < 16 ? 16.0 * (t & ~31) + 120.0 : t);
        }
      },
      kSeeds);
}

__global__ void partial_warp_kernel(int* out) {  // 40 threads: the last warp has 8 lanes
  const unsigned mask = threadIdx.x < 32 ? kFull : 0xffu;
  int value = 1;
  for (int d = threadIdx.x < 32 ? 16 : 4; d > 0; d >>= 1) value += __shfl_xor_sync(mask, value, d);
  out[threadIdx.x] = value;
  __syncthreads();
}

TEST(Intrinsics, ServeAPartialWarp) {
  std::vector<int> out(40);
  AREAL_LAUNCH(partial_warp_kernel, 1, 40, 0, nullptr, out.data());
  for (int t = 0; t < 40; ++t) EXPECT_EQ(out[t], t < 32 ? 32 : 8);
}

__global__ void histogram_kernel(const int* in, int n, unsigned* bins, unsigned* highest) {
  AREAL_DYNAMIC_SHARED(unsigned, local);
  for (unsigned i = threadIdx.x; i < 8; i += blockDim.x) local[i] = 0;
  __syncthreads();
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < static_cast<unsigned>(n); i += gridDim.x * blockDim.x) {
    atomicAdd(&local[in[i] & 7], 1);
    atomicMax(highest, static_cast<unsigned>(in[i]));
  }
  __syncthreads();
  for (unsigned i = threadIdx.x; i < 8; i += blockDim.x) atomicAdd(&bins[i], local[i]);
}

TEST(Intrinsics, CountInSharedThenGlobalAtomics) {
  std::vector<int> in(1001);
  std::iota(in.begin(), in.end(), 0);
  cuda_shim::for_each_order(
      [&] {
        std::vector<unsigned> bins(8);
        unsigned highest = 0;
        AREAL_LAUNCH(histogram_kernel, 3, 96, 8 * sizeof(unsigned), nullptr, in.data(), 1001, bins.data(), &highest);
        EXPECT_EQ(bins, (std::vector<unsigned>{126, 125, 125, 125, 125, 125, 125, 125}));
        EXPECT_EQ(highest, 1000u);
      },
      kSeeds);
}

// Each block leaves a partial sum; the last to arrive adds them in index order and resets the counter.
__global__ void last_block_kernel(const float* in, float* partials, unsigned* arrived, float* out) {
  __shared__ bool last;
  __shared__ float values[32];
  values[threadIdx.x] = in[blockIdx.x * 32 + threadIdx.x];
  __syncwarp();
  if (threadIdx.x == 0) {
    float sum = 0.0f;
    for (const float value : values) sum += value;
    partials[blockIdx.x] = sum;
    __threadfence();
    last = atomicAdd(arrived, 1u) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  if (!last) return;
  float sum = threadIdx.x < gridDim.x ? partials[threadIdx.x] : 0.0f;
  for (int d = 16; d > 0; d >>= 1) sum += __shfl_down_sync(kFull, sum, d);
  if (threadIdx.x == 0) {
    *out = sum;
    *arrived = 0;
  }
}

TEST(Intrinsics, TheLastBlockReadsWhatTheOthersFenced) {
  std::vector<float> in(7 * 32, 0.5f), partials(7);
  cuda_shim::for_each_order(
      [&] {
        float out = 0.0f;
        unsigned arrived = 0;
        AREAL_LAUNCH(last_block_kernel, 7, 32, 0, nullptr, in.data(), partials.data(), &arrived, &out);
        EXPECT_EQ(out, 112.0f);
        EXPECT_EQ(arrived, 0u);
      },
      kSeeds);
}

__global__ void neighbours_kernel(__nv_bfloat16* halves, bool* flags) {
  halves[threadIdx.x] = __float2bfloat16(static_cast<float>(threadIdx.x));
  flags[threadIdx.x] = threadIdx.x % 3 == 0;
  __syncthreads();
  const __nv_bfloat162 pair = reinterpret_cast<__nv_bfloat162*>(halves)[threadIdx.x / 2];
  const float2 both = __bfloat1622float2(pair);
  __syncthreads();
  if (threadIdx.x % 2 == 0) halves[threadIdx.x] = __float2bfloat16(both.x + both.y);
}

TEST(Intrinsics, ThreadsMayWriteNeighbouringBytes) {
  std::vector<__nv_bfloat16> halves(64);
  bool flags[64] = {};
  cuda_shim::for_each_order(
      [&] {
        AREAL_LAUNCH(neighbours_kernel, 1, 64, 0, nullptr, halves.data(), flags);
        for (int t = 0; t < 64; ++t) {
          EXPECT_EQ(__bfloat162float(halves[t]), t % 2 == 0 ? 2 * t + 1 : t);
          EXPECT_EQ(flags[t], t % 3 == 0);
        }
      },
      kSeeds);
}

__global__ void bits_kernel(float4* out, const float4* in, int* bits) {
  __stcs(out + threadIdx.x, __ldcs(in + threadIdx.x));
  if (threadIdx.x == 0) {
    bits[0] = __popc(0xf0f0u) + __clz(1) + __ffs(8) + __clz(0);
    bits[1] = __float_as_int(__int_as_float(0x3f800000));
    const __half2 sum = __hadd2(__floats2half2_rn(1.0f, 2.0f), __floats2half2_rn(3.0f, 4.0f));
    bits[2] = static_cast<int>(__low2float(sum) * 10.0f + __high2float(sum));
  }
}

TEST(Intrinsics, MoveVectorsAndBits) {
  std::vector<float4> in(32, make_float4(1, 2, 3, 4)), out(32);
  int bits[3] = {};
  AREAL_LAUNCH(bits_kernel, 1, 32, 0, nullptr, out.data(), in.data(), bits);
  EXPECT_EQ(out[31].w, 4.0f);
  EXPECT_EQ(bits[0], 8 + 31 + 4 + 32);
  EXPECT_EQ(bits[1], std::bit_cast<int>(1.0f));
  EXPECT_EQ(bits[2], 46);
}

__global__ void fast_maths_kernel(float* out) {
  out[0] = __expf(80.0f) / expf(80.0f) - 1.0f;
  out[1] = __fdividef(1.0f, 0x1p127f);
  out[2] = __expf(-CUDART_INF_F);
  out[3] = __logf(0.0f);
}

TEST(Intrinsics, FastMathsErrAsOnTheDevice) {
  float out[4];
  AREAL_LAUNCH(fast_maths_kernel, 1, 1, 0, nullptr, out);
  EXPECT_NE(out[0], 0.0f);
  EXPECT_LE(std::abs(out[0]), 0x1p-22f * 2 + 0x1p-21f * 80);
  EXPECT_EQ(out[1], 0.0f);
  EXPECT_EQ(out[2], 0.0f);
  EXPECT_EQ(out[3], -CUDART_INF_F);
}

__global__ void coordinates_kernel(unsigned* out) {
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  out[block * blockDim.x * blockDim.y * blockDim.z + thread] += 1 + block * 1000 + thread;
}

TEST(Intrinsics, EveryThreadOfAThreeDimensionalGridRunsOnce) {
  cuda_shim::for_each_order([&] {
    std::vector<unsigned> out(2 * 3 * 4 * 30);
    AREAL_LAUNCH(coordinates_kernel, dim3(2, 3, 4), dim3(5, 3, 2), 0, nullptr, out.data());
    for (unsigned i = 0; i < out.size(); ++i) EXPECT_EQ(out[i], 1 + i / 30 * 1000 + i % 30);
  });
}

}  // namespace
}  // namespace areal::cuda
