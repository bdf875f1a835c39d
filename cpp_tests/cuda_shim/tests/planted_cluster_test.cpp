// Kernels with one planted bug each in clusters and distributed shared memory, which every build must find; what only
// the race build or AddressSanitizer sees is tested there alone.
#include <cmath>
#include <vector>

#include "cuda/cluster.cuh"
#include "cuda/launch.cuh"
#include "cuda_shim/orders.h"
#include "cuda_shim/tests/finding.h"

namespace areal::cuda {
namespace {

using cuda_shim::finding_of;
using cuda_shim::Variant;
using cuda_shim::variant;
using testing::AnyOf;
using testing::HasSubstr;

template <class Body, class Matcher>
void expect_in_every_order(Body body, Matcher matcher) {
  cuda_shim::for_each_order([&] { EXPECT_THAT(finding_of(body), matcher); });
}

// Every block reads the next one's value: a barrier before (written?) and one after (still there?).
template <bool kBefore, bool kAfter>
__global__ void neighbour_kernel(float* out) {
  AREAL_DYNAMIC_SHARED(float, value);
  if (threadIdx.x == 0) *value = 1.0f + static_cast<float>(cluster_rank());
  if (kBefore) {
    cluster_arrive();
    cluster_wait();
  }
  if (threadIdx.x == 0) out[blockIdx.x] = *map_shared(value, (cluster_rank() + 1) % cluster_size());
  if (kAfter) {
    cluster_arrive();
    cluster_wait();
  }
}

template <bool kBefore, bool kAfter>
std::string neighbour_finding(std::vector<float>* out) {
  out->assign(4, 0.0f);
  return finding_of([&] {
    AREAL_LAUNCH_CLUSTERS((neighbour_kernel<kBefore, kAfter>), (ClusterShape{4, 64, 16}), 1u, nullptr, out->data());
  });
}

TEST(PlantedCluster, AClusterBarrierIsMissing) {
  std::vector<float> out;
  cuda_shim::for_each_order([&] {
    EXPECT_EQ((neighbour_finding<true, true>(&out)), "");
    EXPECT_EQ(out, (std::vector<float>{2, 3, 4, 1}));
    const std::string before = neighbour_finding<false, true>(&out);
    const bool poisoned = std::isnan(out[0]) || std::isnan(out[1]) || std::isnan(out[2]) || std::isnan(out[3]);
    if (variant() != Variant::kRace) {
      EXPECT_TRUE(poisoned);
    } else {
      EXPECT_THAT(before, AnyOf(HasSubstr("write-read race in shared memory (dynamic): "),
                                HasSubstr("read-write race in shared memory (dynamic): "),
                                HasSubstr("the block that owns it may not have started")));
    }
  });
}

TEST(PlantedCluster, ABlockExitsWhileOthersReadItsSharedMemory) {
  std::vector<float> out;
  for (const cuda_shim::Order order : {cuda_shim::Order::kForward, cuda_shim::Order::kReversed}) {
    const cuda_shim::ScopedOrder scope(order);
    EXPECT_THAT((neighbour_finding<true, false>(&out)), HasSubstr("the shared memory of the block of rank "));
  }
  if (variant() != Variant::kRace) return;
  cuda_shim::for_each_order([&] {
    EXPECT_THAT((neighbour_finding<true, false>(&out)),
                AnyOf(HasSubstr("the block that owns it may have exited in shared memory (dynamic): read by thread 0"),
                      HasSubstr("the shared memory of the block of rank ")));
  });
}

// The address is taken while the block lives, and used after it has exited.
__global__ void stale_pointer_kernel(float* out) {
  AREAL_DYNAMIC_SHARED(float, value);
  value[threadIdx.x] = 1.0f;
  const float* other = map_shared(value, 1 - cluster_rank());
  cluster_arrive();
  cluster_wait();
  if (cluster_rank() == 1) return;
  __syncthreads();  // all others go first
  if (threadIdx.x == 0) *out = other[0];
}

TEST(PlantedClusterDeathTest, AnExitedBlocksSharedMemoryIsRead) {
  const cuda_shim::ScopedOrder scope(cuda_shim::Order::kReversed);
  float out = 0.0f;
  const auto run = [&] { AREAL_LAUNCH_CLUSTERS(stale_pointer_kernel, (ClusterShape{2, 32, 128}), 1u, nullptr, &out); };
  if (variant() == Variant::kAsan) {
    EXPECT_DEATH(run(), "use-after-poison");
  } else if (variant() == Variant::kRace) {
    EXPECT_THAT(finding_of(run), HasSubstr("the block that owns it may have exited"));
  } else {
    EXPECT_EQ(finding_of(run), "");
    EXPECT_TRUE(std::isnan(out));
  }
}

template <int kPlant>
__global__ void cluster_barrier_kernel() {
  if (kPlant == 0) cluster_wait();
  if (kPlant == 1) cluster_arrive(), cluster_arrive();
  if (kPlant == 2 && cluster_rank() == 0) return;
  if (kPlant == 3 && threadIdx.x == 0) return;
  cluster_arrive();
  if (kPlant == 4 && threadIdx.x < 16) return;
  cluster_wait();
}

template <int kPlant, class Matcher>
void expect_barrier_finding(Matcher matcher) {
  expect_in_every_order(
      [] { AREAL_LAUNCH_CLUSTERS(cluster_barrier_kernel<kPlant>, (ClusterShape{2, 32, 0}), 1u, nullptr); }, matcher);
}

TEST(PlantedCluster, TheClusterBarrierIsMisused) {
  expect_barrier_finding<0>(HasSubstr("cluster barrier: a thread waits without arriving"));
  expect_barrier_finding<1>(HasSubstr("cluster barrier: a thread arrives twice without a wait"));
  expect_barrier_finding<2>(HasSubstr("divergent cluster barrier: "));
  expect_barrier_finding<3>(HasSubstr("divergent cluster barrier: "));
  expect_barrier_finding<4>(HasSubstr("divergent cluster barrier: a thread arrives and exits without a wait"));
  expect_barrier_finding<5>(testing::Eq(""));
}

// A value written between arrive and wait is not covered by that barrier.
__global__ void late_write_kernel(float* out) {
  AREAL_DYNAMIC_SHARED(float, slots);
  cluster_arrive();
  cluster_wait();
  cluster_arrive();
  if (threadIdx.x == 0) *map_shared(slots, 1 - cluster_rank()) = 1.0f;
  cluster_wait();
  if (threadIdx.x == 0) out[cluster_rank()] = *slots;
  cluster_arrive();
  cluster_wait();
}

TEST(PlantedCluster, AClusterBarrierDoesNotCoverWhatFollowsTheArrival) {
  if (variant() != Variant::kRace) GTEST_SKIP();
  std::vector<float> out(2);
  expect_in_every_order(
      [&] { AREAL_LAUNCH_CLUSTERS(late_write_kernel, (ClusterShape{2, 32, 16}), 1u, nullptr, out.data()); },
      AnyOf(HasSubstr("write-read race in shared memory (dynamic): "),
            HasSubstr("read-write race in shared memory (dynamic): "),
            HasSubstr("read of uninitialised memory in shared memory (dynamic): ")));
}

__global__ void static_shared_kernel(float* out) {
  __shared__ float value;
  if (threadIdx.x == 0) value = static_cast<float>(cluster_rank());
  __syncthreads();
  out[blockIdx.x] = value;
}

TEST(PlantedCluster, AKernelOfAClusterHasStaticSharedMemory) {
  if (variant() == Variant::kAsan) GTEST_SKIP() << "static shared arrays are not known there";
  std::vector<float> out(2);
  EXPECT_THAT(finding_of([&] {
                AREAL_LAUNCH_CLUSTERS(static_shared_kernel, (ClusterShape{2, 1, 0}), 1u, nullptr, out.data());
              }),
              HasSubstr("expected dynamic shared memory only in a kernel launched with clusters"));
}

}  // namespace
}  // namespace areal::cuda
