// Kernels with one planted bug each in how accesses are ordered; the race build must name both sides.
#include <algorithm>
#include <random>
#include <vector>

#include "cuda/launch.cuh"
#include "cuda_shim/orders.h"
#include "cuda_shim/tests/finding.h"

namespace areal::cuda {
namespace {

using cuda_shim::finding_of;
using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;

constexpr unsigned kFull = 0xffffffffu;

template <class Body, class Matcher>
void expect_in_every_order(Body body, Matcher matcher) {
  cuda_shim::for_each_order([&] { EXPECT_THAT(finding_of(body), matcher); });
}

template <int kThreads>
__global__ void missing_barrier_kernel(float* out) {
  __shared__ float partial[kThreads / 32];
  if ((threadIdx.x & 31) == 0) partial[threadIdx.x / 32] = 1.0f;
  if (threadIdx.x == 0) {
    float sum = 0.0f;
    for (int w = 0; w < kThreads / 32; ++w) sum += partial[w];
    *out = sum;
  }
}

TEST(PlantedRace, NoBarrierBetweenWriteAndRead) {
  float out = 0.0f;
  expect_in_every_order(
      [&] { AREAL_LAUNCH(missing_barrier_kernel<256>, 1, 256, 0, nullptr, &out); },
      AllOf(HasSubstr("race in shared memory (partial): "), HasSubstr("thread 0 of block (0,0,0) [warp 0 lane 0]"),
            HasSubstr("planted_race_test.cpp:"), HasSubstr("nothing orders them")));
}

template <int kThreads>
__global__ void reuse_kernel(float* out) {
  __shared__ float partial[kThreads / 32];
  float total = 0.0f;
  for (int round = 0; round < 3; ++round) {
    if ((threadIdx.x & 31) == 0) partial[threadIdx.x / 32] = round;
    __syncthreads();
    for (int w = 0; w < kThreads / 32; ++w) total += partial[w];
    // missing: a second barrier before the next round writes
  }
  out[threadIdx.x] = total;
}

TEST(PlantedRace, AnArrayIsReusedBeforeAllHaveReadIt) {
  std::vector<float> out(256);
  expect_in_every_order([&] { AREAL_LAUNCH(reuse_kernel<256>, 1, 256, 0, nullptr, out.data()); },
                        HasSubstr("race in shared memory (partial): "));
}

__global__ void warp_synchronous_kernel(float* out) {
  __shared__ float values[32];
  values[threadIdx.x] = threadIdx.x;
  out[threadIdx.x] = values[31 - threadIdx.x];
}

TEST(PlantedRace, AWarpReliesOnRunningInStep) {
  std::vector<float> out(32);
  expect_in_every_order([&] { AREAL_LAUNCH(warp_synchronous_kernel, 1, 32, 0, nullptr, out.data()); },
                        HasSubstr("race in shared memory (values): "));
}

__global__ void shuffle_orders_nothing_kernel(float* out) {
  __shared__ float values[32];
  values[threadIdx.x] = threadIdx.x;
  __shfl_sync(kFull, 0, 0);  // not a memory barrier
  out[threadIdx.x] = values[31 - threadIdx.x];
}

TEST(PlantedRace, AShuffleIsTakenForABarrier) {
  std::vector<float> out(32);
  expect_in_every_order([&] { AREAL_LAUNCH(shuffle_orders_nothing_kernel, 1, 32, 0, nullptr, out.data()); },
                        HasSubstr("write-read race in shared memory (values): "));
}

__global__ void uninitialised_kernel(float* out) {
  __shared__ float values[64];
  if (threadIdx.x < 32) values[threadIdx.x] = 1.0f;
  __syncthreads();
  out[threadIdx.x] = values[threadIdx.x];
}

TEST(PlantedRace, SharedMemoryIsReadBeforeItIsWritten) {
  std::vector<float> out(64);
  expect_in_every_order([&] { AREAL_LAUNCH(uninitialised_kernel, 1, 64, 0, nullptr, out.data()); },
                        AllOf(HasSubstr("read of uninitialised memory in shared memory (values): read by thread "),
                              HasSubstr("[warp 1")));
}

__global__ void stale_dynamic_kernel(float* out) {
  AREAL_DYNAMIC_SHARED(float, values);
  if (blockIdx.x == 0) values[threadIdx.x] = 1.0f;  // the next block counts on finding it there
  out[threadIdx.x] = values[threadIdx.x];
}

TEST(PlantedRace, SharedMemoryDoesNotOutliveItsBlock) {
  std::vector<float> out(32);
  expect_in_every_order([&] { AREAL_LAUNCH(stale_dynamic_kernel, 2, 32, 128, nullptr, out.data()); },
                        HasSubstr("read of uninitialised memory in shared memory (dynamic): "));
}

__global__ void shared_counter_kernel(unsigned* out) {
  __shared__ unsigned count;
  atomicAdd(&count, 1u);
  __syncthreads();
  if (threadIdx.x == 0) *out = count;
}

TEST(PlantedRace, ASharedCounterIsNeverCleared) {
  unsigned out = 0;
  expect_in_every_order([&] { AREAL_LAUNCH(shared_counter_kernel, 1, 32, 0, nullptr, &out); },
                        HasSubstr("read of uninitialised memory in shared memory (count): "));
}

__global__ void increment_kernel(float* out) { out[0] += 1.0f; }

TEST(PlantedRace, ThreadsOfOneAndOfTwoBlocksWriteOneAddress) {
  float out = 0.0f;
  expect_in_every_order([&] { AREAL_LAUNCH(increment_kernel, 1, 32, 0, nullptr, &out); },
                        HasSubstr("race in global memory: "));
  expect_in_every_order(
      [&] { AREAL_LAUNCH(increment_kernel, 2, 1, 0, nullptr, &out); },
      AllOf(HasSubstr("race in global memory: "), HasSubstr("block (0,0,0)"), HasSubstr("block (1,0,0)")));
}

__global__ void overlap_kernel(uint16_t* out) {  // blocks of 32 halves that overlap by one
  out[blockIdx.x * 31 + threadIdx.x] = 1;
}

TEST(PlantedRace, NeighbouringBlocksOverlapByOneElement) {
  std::vector<uint16_t> out(63);
  expect_in_every_order([&] { AREAL_LAUNCH(overlap_kernel, 2, 32, 0, nullptr, out.data()); },
                        HasSubstr("write-write race in global memory: "));
}

__global__ void atomic_and_plain_kernel(unsigned* counter, unsigned* out) {
  atomicAdd(counter, 1u);
  out[threadIdx.x] = __ldcg(counter);
}

TEST(PlantedRace, AnAtomicCounterIsReadPlainlyAndBothLinesAreNamed) {
  unsigned counter = 0;
  std::vector<unsigned> out(32);
  expect_in_every_order([&] { AREAL_LAUNCH(atomic_and_plain_kernel, 1, 32, 0, nullptr, &counter, out.data()); },
                        AllOf(HasSubstr("race in global memory: "), HasSubstr("atomic write by thread "),
                              ContainsRegex("read by thread [^;]* at planted_race_test.cpp:"),
                              ContainsRegex("atomic write by thread [^;]* at planted_race_test.cpp:")));
}

// The hand-over between blocks, with either fence left out.
template <bool kWriterFences, bool kReaderFences>
__global__ void last_block_kernel(float* partials, unsigned* arrived, float* out) {
  partials[blockIdx.x] = 1.0f;
  if (kWriterFences) __threadfence();
  const bool last = atomicAdd(arrived, 1u) == gridDim.x - 1;
  if (kReaderFences) __threadfence();
  if (!last) return;
  for (unsigned b = 0; b < gridDim.x; ++b) *out += partials[b];
}

template <bool kWriterFences, bool kReaderFences>
std::string last_block_finding() {
  std::vector<float> partials(4);
  float out = 0.0f;
  unsigned arrived = 0;
  return finding_of([&] {
    AREAL_LAUNCH((last_block_kernel<kWriterFences, kReaderFences>), 4, 1, 0, nullptr, partials.data(), &arrived, &out);
  });
}

TEST(PlantedRace, BlocksHandOverWithoutFences) {
  cuda_shim::for_each_order([&] {
    EXPECT_EQ((last_block_finding<true, true>()), "");
    EXPECT_THAT((last_block_finding<false, true>()), HasSubstr("write-read race in global memory: "));
    EXPECT_THAT((last_block_finding<true, false>()), HasSubstr("write-read race in global memory: "));
    EXPECT_THAT((last_block_finding<false, false>()), HasSubstr("write-read race in global memory: "));
  });
}

__global__ void late_write_kernel(float* partials, unsigned* arrived, float* out) {
  __threadfence();
  partials[blockIdx.x] = 1.0f;  // after the fence: not published
  const bool last = atomicAdd(arrived, 1u) == gridDim.x - 1;
  __threadfence();
  if (last) *out = partials[0] + partials[1];
}

TEST(PlantedRace, AFenceDoesNotCoverWhatFollowsIt) {
  std::vector<float> partials(2);
  float out = 0.0f;
  unsigned arrived = 0;
  EXPECT_THAT(finding_of([&] { AREAL_LAUNCH(late_write_kernel, 2, 1, 0, nullptr, partials.data(), &arrived, &out); }),
              HasSubstr("write-read race in global memory: "));
}

__global__ void barriers_kernel() {
  __syncthreads();
  __syncthreads();
}

TEST(PlantedRace, TheShimItselfIsNotWatched) {
  // The scheduler draws orders with the same templates; the linker keeps one copy of them, perhaps this instrumented
  // one.
  std::mt19937_64 random(1);
  std::vector<unsigned> order(64);
  std::shuffle(order.begin(), order.end(), random);
  cuda_shim::for_each_order(
      [&] { EXPECT_EQ(finding_of([] { AREAL_LAUNCH(barriers_kernel, 2, 64, 0, nullptr); }), ""); });
}

}  // namespace
}  // namespace areal::cuda
