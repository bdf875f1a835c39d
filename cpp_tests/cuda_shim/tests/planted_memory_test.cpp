// Kernels with one planted bug each in where they read and write; ASan and UBSan must stop the process and say why.
#include <cstdlib>
#include <memory>
#include <vector>

#include "cuda/launch.cuh"
#include "cuda_shim/tests/finding.h"

namespace areal::cuda {
namespace {

// A heap array without slack, for ASan to guard to the byte.
template <class T>
std::unique_ptr<T[]> heap(size_t n) {
  return std::make_unique<T[]>(n);
}

__global__ void vector_tail_kernel(const __nv_bfloat16* row, float* out, int n) {
  float sum = 0.0f;
  for (int i = threadIdx.x; i < (n + 7) / 8; i += blockDim.x) {
    sum += static_cast<float>(__ldg(reinterpret_cast<const uint4*>(row) + i).x);  // only the first lane is used
  }
  atomicAdd(out, sum);
}

TEST(PlantedMemoryDeathTest, AVectorReadsPastTheEndOfARow) {
  const auto row = heap<__nv_bfloat16>(1003);
  float out = 0.0f;
  EXPECT_DEATH(AREAL_LAUNCH(vector_tail_kernel, 1, 64, 0, nullptr, row.get(), &out, 1003), "heap-buffer-overflow");
}

__global__ void misaligned_row_kernel(const __nv_bfloat16* rows, float* out, int stride) {
  const auto* row = reinterpret_cast<const uint4*>(rows + blockIdx.x * stride);
  if (threadIdx.x == 0) out[blockIdx.x] = static_cast<float>(row[0].x);
}

TEST(PlantedMemoryDeathTest, AVectorIsReadFromAnOddRow) {
  const auto rows = heap<__nv_bfloat16>(4096);
  std::vector<float> out(2);
  EXPECT_DEATH(AREAL_LAUNCH(misaligned_row_kernel, 2, 32, 0, nullptr, rows.get(), out.data(), 1001),
               "misaligned address");
}

__global__ void dynamic_overflow_kernel(float* out) {
  AREAL_DYNAMIC_SHARED(float, values);
  values[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = values[threadIdx.x + 1];
}

TEST(PlantedMemoryDeathTest, DynamicSharedMemoryIsReadPastItsEnd) {
  std::vector<float> out(64);
  EXPECT_DEATH(AREAL_LAUNCH(dynamic_overflow_kernel, 1, 64, 64 * sizeof(float), nullptr, out.data()),
               "heap-buffer-overflow");
}

__global__ void static_overflow_kernel(float* out, int shift) {
  __shared__ float values[64];
  float* p = values;
  p[threadIdx.x + shift] = 1;
  __syncthreads();
  out[threadIdx.x] = values[threadIdx.x];
}

TEST(PlantedMemoryDeathTest, AStaticSharedArrayIsWrittenPastItsEnd) {
  std::vector<float> out(64);
  EXPECT_DEATH(AREAL_LAUNCH(static_overflow_kernel, 1, 64, 0, nullptr, out.data(), 8),
               "insufficient space for an object|global-buffer-overflow");
}

template <int kSize>
__global__ void template_overflow_kernel(float* out, int shift) {
  __shared__ float values[kSize];
  values[threadIdx.x + shift] = 1;
  __syncthreads();
  out[threadIdx.x] = values[threadIdx.x];
}

TEST(PlantedMemoryDeathTest, ASharedArrayOfATemplateIsIndexedOutOfBounds) {
  std::vector<float> out(64);
  EXPECT_DEATH(AREAL_LAUNCH(template_overflow_kernel<64>, 1, 64, 0, nullptr, out.data(), 8),
               "index 64 out of bounds|global-buffer-overflow");
}

__global__ void offset_overflow_kernel(const float* in, float* out, int vocab) {
  const int row = static_cast<int>(blockIdx.x) + 30000;
  const int offset = row * vocab;
  out[threadIdx.x] = in[offset & 63];
}

TEST(PlantedMemoryDeathTest, ARowOffsetOverflows32Bits) {
  std::vector<float> in(64), out(32);
  EXPECT_DEATH(AREAL_LAUNCH(offset_overflow_kernel, 1, 32, 0, nullptr, in.data(), out.data(), 151936),
               "signed integer overflow: 30000 \\* 151936");
}

__global__ void before_start_kernel(float* out) { out[static_cast<int>(threadIdx.x) - 1] = 0.0f; }

TEST(PlantedMemoryDeathTest, GlobalMemoryIsWrittenBeforeItsStart) {
  const auto out = heap<float>(32);
  EXPECT_DEATH(AREAL_LAUNCH(before_start_kernel, 1, 32, 0, nullptr, out.get()), "heap-buffer-overflow");
}

__global__ void local_overflow_kernel(float* out, int n) {
  float local[4] = {0.0f, 1.0f, 2.0f, 3.0f};
  float sum = 0.0f;
  for (int i = 0; i < n; ++i) sum += local[i];
  out[threadIdx.x] = sum;
}

TEST(PlantedMemoryDeathTest, ALocalArrayIsReadPastItsEnd) {
  std::vector<float> out(32);
  EXPECT_DEATH(AREAL_LAUNCH(local_overflow_kernel, 1, 32, 0, nullptr, out.data(), 5),
               "index 4 out of bounds|stack-buffer-overflow");
}

__global__ void shift_kernel(int* out, int bits) { out[threadIdx.x] = 1 << bits; }

TEST(PlantedMemoryDeathTest, AShiftIsTooWide) {
  std::vector<int> out(32);
  EXPECT_DEATH(AREAL_LAUNCH(shift_kernel, 1, 32, 0, nullptr, out.data(), 33), "shift exponent 33 is too large");
}

[[gnu::noinline]] int recurse(int depth) {
  volatile char frame[256] = {};
  return depth > 0 ? recurse(depth - 1) + frame[1] : frame[0];
}

__global__ void recursive_kernel(int* out) { out[threadIdx.x] = recurse(1 << 20); }

TEST(PlantedMemoryDeathTest, AThreadOverflowsItsStack) {
  std::vector<int> out(32);
  EXPECT_DEATH(AREAL_LAUNCH(recursive_kernel, 1, 32, 0, nullptr, out.data()), "stack-overflow|SEGV");
}

}  // namespace
}  // namespace areal::cuda
