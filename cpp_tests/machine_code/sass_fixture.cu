// Kernels for sass_check_test.py: one as it should be, and one for each fault that sass_check.py looks for.
#include <cuda_runtime.h>

namespace {

__global__ void wide_kernel(const float4* in, float4* out) { out[threadIdx.x] = in[threadIdx.x]; }

__global__ void narrow_kernel(const float* in, float* out) { out[threadIdx.x] = in[threadIdx.x]; }

// 64 registers a thread at most, and more than that alive at once.
__global__ void __launch_bounds__(1024) spilling_kernel(const float* in, float* out, int rounds) {
  float values[96];
#pragma unroll
  for (int i = 0; i < 96; ++i) values[i] = in[i * 1024 + threadIdx.x];
  for (int round = 0; round < rounds; ++round) {
#pragma unroll
    for (int i = 0; i < 96; ++i) values[i] = values[i] * values[(i + 37) % 96] + values[(i + 11) % 96];
  }
#pragma unroll
  for (int i = 0; i < 96; ++i) out[i * 1024 + threadIdx.x] = values[i];
}

__global__ void local_array_kernel(const int* in, float* out, int rounds) {
  float values[64] = {};
  for (int i = 0; i < rounds; ++i) values[in[i] & 63] += out[i];  // indices known only at run time
  for (int i = 0; i < rounds; ++i) out[i] = values[in[i + rounds] & 63];
}

__global__ void shared_kernel(float* out) {
  __shared__ float values[4096];
  values[threadIdx.x] = out[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = values[threadIdx.x ^ 1];
}

}  // namespace

void launch_fixtures(float* p) {
  wide_kernel<<<1, 32>>>(reinterpret_cast<const float4*>(p), reinterpret_cast<float4*>(p));
  narrow_kernel<<<1, 32>>>(p, p);
  spilling_kernel<<<1, 32>>>(p, p, 2);
  local_array_kernel<<<1, 32>>>(reinterpret_cast<const int*>(p), p, 9);
  shared_kernel<<<1, 32>>>(p);
}
