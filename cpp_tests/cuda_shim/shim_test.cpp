#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "cuda/launch.cuh"
#include "cuda_shim/orders.h"

namespace areal::cuda {
namespace {

template <int kThreads>
__global__ void block_sum_kernel(const float* __restrict__ in, float* __restrict__ out, int n) {
  __shared__ float partial[kThreads / 32];
  float sum = 0.0f;
  for (int i = threadIdx.x; i < n; i += kThreads) sum += __ldg(in + blockIdx.x * static_cast<int64_t>(n) + i);
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, d);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kThreads / 32; ++w) sum += partial[w];
    out[blockIdx.x] = sum;
  }
}

template <int kThreads>
__global__ void race_kernel(float* out) {
  __shared__ float partial[kThreads / 32];
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = 1;
  if (threadIdx.x == 0) {
    float sum = 0;
    for (int w = 0; w < kThreads / 32; ++w) sum += partial[w];
    out[0] = sum;
  }
}

TEST(Shim, SumsBlocksInEveryOrder) {
  std::vector<float> in(3 * 1000), out(3);
  std::iota(in.begin(), in.end(), 0.0f);
  cuda_shim::for_each_order([&] {
    AREAL_LAUNCH(block_sum_kernel<128>, 3, 128, 0, nullptr, in.data(), out.data(), 1000);
    for (int b = 0; b < 3; ++b) EXPECT_EQ(out[b], 1000.0f * (1000 * b) + 499500.0f);
  });
}

TEST(Shim, FindsAReadBeforeTheBarrier) {
  float out = 0.0f;
  std::string message;
  try {
    AREAL_LAUNCH(race_kernel<128>, 1, 128, 0, nullptr, &out);
  } catch (const cuda_shim::Error& error) {
    message = error.what();
  }
  switch (cuda_shim::variant()) {
    case cuda_shim::Variant::kPlain:
      EXPECT_TRUE(std::isnan(out)) << "shared memory starts as NaN";
      break;
    case cuda_shim::Variant::kAsan:
      break;
    case cuda_shim::Variant::kRace:
      EXPECT_NE(message.find("read-write race in shared memory (partial)"), message.npos) << message;
      break;
  }
}

}  // namespace
}  // namespace areal::cuda
