// Launch configurations, the host runtime, and what a block starts with.
#include "cuda/launch.cuh"

#include <cmath>
#include <cstring>
#include <vector>

#include "cuda_shim/tests/finding.h"

namespace areal::cuda {
namespace {

using cuda_shim::finding_of;
using testing::HasSubstr;

__global__ void empty_kernel() {}
__global__ void other_kernel() {}

std::string launch_finding(dim3 grid, dim3 block, size_t shared_bytes = 0) {
  return finding_of([&] { AREAL_LAUNCH(empty_kernel, grid, block, shared_bytes, nullptr); });
}

TEST(Launch, RefusesWhatADeviceRefuses) {
  EXPECT_EQ(launch_finding(1, 1024), "");
  EXPECT_EQ(launch_finding(1, dim3(4, 4, 64)), "");
  EXPECT_THAT(launch_finding(0, 32), HasSubstr("expected a grid of 1 to (2147483647, 65535, 65535) blocks"));
  EXPECT_THAT(launch_finding(dim3(1, 65536), 32), HasSubstr("got (1, 65536, 1)"));
  EXPECT_THAT(launch_finding(1, 0), HasSubstr("expected 1 to 1024 threads a block, 64 along z, got 0"));
  EXPECT_THAT(launch_finding(1, dim3(1025)), HasSubstr("got 1025"));
  EXPECT_THAT(launch_finding(1, dim3(1, 1, 65)), HasSubstr("64 along z"));
  EXPECT_THAT(launch_finding(1, dim3(65536, 65536)), HasSubstr("expected 1 to 1024 threads"));
}

TEST(Launch, AsksForLargeSharedMemoryFirst) {
  EXPECT_EQ(launch_finding(1, 32, 48 * 1024), "");
  EXPECT_THAT(launch_finding(1, 32, 48 * 1024 + 1),
              HasSubstr("expected cudaFuncAttributeMaxDynamicSharedMemorySize >= 49153"));
  AREAL_CUDA_CHECK(cudaFuncSetAttribute(other_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 100 * 1024));
  EXPECT_NE(launch_finding(1, 32, 100 * 1024), "");  // another kernel's
  AREAL_CUDA_CHECK(cudaFuncSetAttribute(empty_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 100 * 1024));
  EXPECT_EQ(launch_finding(1, 32, 100 * 1024), "");
  EXPECT_NE(launch_finding(1, 32, 100 * 1024 + 1), "");
  EXPECT_THROW(
      AREAL_CUDA_CHECK(cudaFuncSetAttribute(empty_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 228 * 1024)),
      Error);
}

struct Values {
  float statics, dynamics;
};

// Reads what nothing wrote, through volatile so that the compiler cannot know it.
__global__ void untouched_kernel(Values* out) {
  __shared__ float statics[4];
  AREAL_DYNAMIC_SHARED(float, dynamics);
  volatile float* first = statics;
  volatile float* second = dynamics;
  out[blockIdx.x] = {first[3], second[3]};
  first[3] = 1.0f;
  second[3] = 1.0f;
}

TEST(Launch, SharedMemoryStartsAsNaNInEveryBlock) {
  if (cuda_shim::variant() == cuda_shim::Variant::kRace) {
    EXPECT_THAT(finding_of([] {
                  Values out[2];
                  AREAL_LAUNCH(untouched_kernel, 2, 1, 16, nullptr, out);
                }),
                HasSubstr("read of uninitialised memory"));
    return;
  }
  Values out[2] = {};
  AREAL_LAUNCH(untouched_kernel, 2, 1, 16, nullptr, out);
  for (const Values& values : out) {
    EXPECT_TRUE(std::isnan(values.dynamics));
    // Under AddressSanitizer shared arrays are plain statics, which the shim cannot tell from others.
    if (cuda_shim::variant() == cuda_shim::Variant::kPlain) {
      EXPECT_TRUE(std::isnan(values.statics));
    }
  }
}

__global__ void converted_kernel(int64_t* out, int64_t a, float b) { *out = a + static_cast<int64_t>(b); }

TEST(Launch, ConvertsArgumentsOnceBeforeAnyThreadRuns) {
  int64_t out = 0;
  int calls = 0;
  const auto argument = [&] { return ++calls; };
  AREAL_LAUNCH(converted_kernel, 1, 1, 0, nullptr, &out, argument(), 2);
  EXPECT_EQ(out, 3);
  EXPECT_EQ(calls, 1);
}

TEST(HostRuntime, CopiesAndFillsHostMemory) {
  std::vector<int> from{1, 2, 3}, to(3);
  AREAL_CUDA_CHECK(cudaMemcpyAsync(to.data(), from.data(), 12, cudaMemcpyDefault, nullptr));
  EXPECT_EQ(to, from);
  AREAL_CUDA_CHECK(cudaMemsetAsync(to.data(), 0, 8, nullptr));
  EXPECT_EQ(to, (std::vector<int>{0, 0, 3}));
  EXPECT_EQ(multiprocessor_count(), 4);
}

}  // namespace
}  // namespace areal::cuda
