// Kernels with one planted bug each in how threads meet; every build must name it.
#include <cmath>
#include <vector>

#include "cuda/launch.cuh"
#include "cuda_shim/orders.h"
#include "cuda_shim/tests/finding.h"

namespace areal::cuda {
namespace {

using cuda_shim::finding_of;
using testing::AllOf;
using testing::HasSubstr;

constexpr unsigned kFull = 0xffffffffu;

// The finding in every order: what is wrong may not depend on who runs first.
template <class Body, class Matcher>
void expect_in_every_order(Body body, Matcher matcher) {
  cuda_shim::for_each_order([&] { EXPECT_THAT(finding_of(body), matcher); });
}

__global__ void exit_before_barrier_kernel(float* out) {
  if (threadIdx.x < 100) __syncthreads();
  out[threadIdx.x] = 1;
}

TEST(PlantedSync, ThreadsExitBeforeABarrier) {
  std::vector<float> out(256);
  const auto run = [&] { AREAL_LAUNCH(exit_before_barrier_kernel, 1, 256, 0, nullptr, out.data()); };
  expect_in_every_order(run, AllOf(HasSubstr("divergent barrier"), HasSubstr("exited"),
                                   HasSubstr("kernel 'exit_before_barrier_kernel'")));
  cuda_shim::ScopedOrder scope(cuda_shim::Order::kForward);
  cuda_shim::options().exited_threads_pass_barriers = true;
  EXPECT_EQ(finding_of(run), "");
}

__global__ void two_barriers_kernel(float* out) {
  if (threadIdx.x < 128) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  out[threadIdx.x] = 1;
}

TEST(PlantedSync, ThreadsWaitAtDifferentBarriers) {
  std::vector<float> out(256);
  expect_in_every_order([&] { AREAL_LAUNCH(two_barriers_kernel, 1, 256, 0, nullptr, out.data()); },
                        HasSubstr("divergent barrier: some threads wait at __syncthreads at planted_sync_test.cpp:"));
}

__global__ void missing_lanes_kernel(float* out) {
  float value = threadIdx.x;
  if ((threadIdx.x & 31) < 16) value += __shfl_xor_sync(kFull, value, 8);
  __syncthreads();
  out[threadIdx.x] = value;
}

TEST(PlantedSync, LanesNamedInTheMaskNeverCome) {
  std::vector<float> out(64);
  expect_in_every_order([&] { AREAL_LAUNCH(missing_lanes_kernel, 1, 64, 0, nullptr, out.data()); },
                        AllOf(HasSubstr("deadlock in kernel 'missing_lanes_kernel', block (0,0,0): 64 threads"),
                              HasSubstr("warp 0 lanes 0000ffff: wait at __shfl_xor_sync(mask ffffffff)"),
                              HasSubstr("lanes ffff0000 never came"),
                              HasSubstr("warp 1 lanes ffff0000: wait at __syncthreads at planted_sync_test.cpp:")));
}

__global__ void idle_source_kernel(float* out) {
  float value = threadIdx.x;
  if ((threadIdx.x & 31) < 16) value += __shfl_xor_sync(0x0000ffffu, value, 16);
  out[threadIdx.x] = value;
}

TEST(PlantedSync, AShuffleReadsALaneOutsideItsMask) {
  std::vector<float> out(32);
  expect_in_every_order(
      [&] { AREAL_LAUNCH(idle_source_kernel, 1, 32, 0, nullptr, out.data()); },
      AllOf(HasSubstr("shuffle reads lane "), HasSubstr(", which took no part in it"), HasSubstr("[warp 0 lane ")));
}

__global__ void absent_lane_kernel(int* out) { out[threadIdx.x] = __shfl_down_sync(kFull, threadIdx.x, 1); }

TEST(PlantedSync, AShuffleReadsALaneThatDoesNotExist) {
  std::vector<int> out(20);
  expect_in_every_order([&] { AREAL_LAUNCH(absent_lane_kernel, 1, 20, 0, nullptr, out.data()); },
                        HasSubstr("shuffle reads lane 20, which took no part in it"));
}

__global__ void not_in_mask_kernel(int* out) { out[threadIdx.x] = __any_sync(0x0000ffffu, 1); }

TEST(PlantedSync, TheCallerIsNotInItsOwnMask) {
  std::vector<int> out(32);
  expect_in_every_order([&] { AREAL_LAUNCH(not_in_mask_kernel, 1, 32, 0, nullptr, out.data()); },
                        HasSubstr("__any_sync: the calling lane is not in its own mask 0000ffff"));
}

__global__ void mixed_operations_kernel(unsigned* out) {
  out[threadIdx.x] = threadIdx.x < 16 ? __ballot_sync(kFull, 1) : __shfl_sync(kFull, 1u, 0);
}

TEST(PlantedSync, LanesMeetInDifferentOperations) {
  std::vector<unsigned> out(32);
  expect_in_every_order([&] { AREAL_LAUNCH(mixed_operations_kernel, 1, 32, 0, nullptr, out.data()); },
                        AllOf(HasSubstr("lanes of one warp meet in different operations"), HasSubstr("__ballot_sync"),
                              HasSubstr("__shfl_sync")));
}

__global__ void two_shuffles_kernel(int* out) {
  if (threadIdx.x < 16) {
    out[threadIdx.x] = __shfl_sync(kFull, 1, 0);
  } else {
    out[threadIdx.x] = __shfl_sync(kFull, 2, 0);
  }
}

TEST(PlantedSync, LanesMeetInDifferentCallsOfOneShuffle) {
  std::vector<int> out(32);
  expect_in_every_order([&] { AREAL_LAUNCH(two_shuffles_kernel, 1, 32, 0, nullptr, out.data()); },
                        HasSubstr("lanes of one warp meet in different operations"));
}

__global__ void masks_differ_kernel() {
  __syncwarp(threadIdx.x < 16 ? kFull : 0xffff0000u);
  __syncthreads();
}

TEST(PlantedSync, LanesNameDifferentMasks) {
  expect_in_every_order([&] { AREAL_LAUNCH(masks_differ_kernel, 1, 32, 0, nullptr); },
                        AllOf(HasSubstr("deadlock"), HasSubstr("wait at __syncwarp(mask ffffffff)")));
}

__global__ void misaligned_load_kernel(const float* in, float* out) {
  out[threadIdx.x] = __ldg(reinterpret_cast<const float4*>(in + 1) + threadIdx.x).x;
}

TEST(PlantedSync, ACachedLoadIsMisaligned) {
  std::vector<float> in(256), out(32);
  expect_in_every_order([&] { AREAL_LAUNCH(misaligned_load_kernel, 1, 32, 0, nullptr, in.data(), out.data()); },
                        HasSubstr("access of 16 bytes at an address that is 4 past a multiple of 16"));
}

// The planted bugs that only a hostile order shows: results, not findings.
__global__ void first_warp_first_kernel(int* flag, int* out) {
  if (threadIdx.x == 0) atomicExch(flag, 1);
  out[threadIdx.x] = atomicAdd(flag, 0);
}

TEST(PlantedSync, OrdersShowThatAResultRestsOnWhoRunsFirst) {
  const auto seen = [](cuda_shim::Order order) {
    const cuda_shim::ScopedOrder scope(order);
    int flag = 0;
    std::vector<int> out(64);
    AREAL_LAUNCH(first_warp_first_kernel, 1, 64, 0, nullptr, &flag, out.data());
    return out[63];
  };
  EXPECT_EQ(seen(cuda_shim::Order::kForward), 1);
  EXPECT_EQ(seen(cuda_shim::Order::kReversed), 0);
}

__global__ void throwing_kernel() {
  if (threadIdx.x == 40) throw std::runtime_error("from a kernel");
  __syncthreads();
}

TEST(PlantedSync, AnExceptionLeavesTheLaunchAndTheNextOneWorks) {
  EXPECT_THROW(AREAL_LAUNCH(throwing_kernel, 1, 64, 0, nullptr), std::runtime_error);
  std::vector<float> out(64);
  EXPECT_EQ(finding_of([&] { AREAL_LAUNCH(two_barriers_kernel, 1, 64, 0, nullptr, out.data()); }), "");
}

}  // namespace
}  // namespace areal::cuda
