// Right kernels with clusters, distributed shared memory, mbarriers and bulk copies: nothing to find in any build.
#include "cuda/cluster.cuh"

#include <cmath>
#include <numeric>
#include <vector>

#include "cuda/bulk_copy.cuh"
#include "cuda/launch.cuh"
#include "cuda_shim/orders.h"

namespace areal::cuda {
namespace {

// 16-byte aligned, as bulk copies ask.
struct alignas(16) Quad {
  float x[4];
};
std::vector<Quad> iota(size_t quads) {
  std::vector<Quad> values(quads);
  for (size_t i = 0; i < 4 * quads; ++i) values[i / 4].x[i % 4] = static_cast<float>(i);
  return values;
}

__global__ void indices_kernel(unsigned* out) {
  if (threadIdx.x == 0) {
    out[blockIdx.x] = cluster_index() * 1000 + cluster_count() * 100 + cluster_rank() * 10 + cluster_size();
  }
}

TEST(Cluster, RanksAndSizes) {
  std::vector<unsigned> out(6);
  cuda_shim::for_each_order([&] {
    AREAL_LAUNCH_CLUSTERS(indices_kernel, (ClusterShape{3, 32, 0}), 2u, nullptr, out.data());
    EXPECT_EQ(out, (std::vector<unsigned>{203, 213, 223, 1203, 1213, 1223}));
  });
}

// Block r adds r + 1 to the sum; every block gets 1 + ... + size, round after round in the same two sets of slots.
__global__ void reduce_kernel(float* out, int rounds) {
  AREAL_DYNAMIC_SHARED(float, slots);
  const auto add = [](float a, float b) { return a + b; };
  cluster_arrive();
  cluster_wait();
  float sum = 0.0f;
  for (int round = 0; round < rounds; ++round) {
    float* own = slots + (round & 1) * cluster_size();
    if (threadIdx.x < kWarp) cluster_publish(static_cast<float>(cluster_rank() + 1), own);
    cluster_arrive();
    cluster_wait();
    if (threadIdx.x < kWarp) sum += cluster_collect(own, 0.0f, add);
  }
  if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

TEST(Cluster, ReducesOverDistributedSharedMemory) {
  for (const unsigned size : {1u, 2u, 3u, 8u}) {
    std::vector<float> out(2 * size);
    cuda_shim::for_each_order([&] {
      const ClusterShape shape{size, 64, static_cast<int64_t>(2 * size * sizeof(float))};
      AREAL_LAUNCH_CLUSTERS(reduce_kernel, shape, 2u, nullptr, out.data(), 5);
      for (const float sum : out) EXPECT_EQ(sum, 5.0f * static_cast<float>(size * (size + 1)) / 2);
    });
  }
}

// A ring of kStages tiles: one thread keeps loads under way, the others add up, and say on `empty` that they have.
constexpr int kStages = 3, kTile = 64;  // quads a tile

struct Ring {
  Quad tiles[kStages][kTile];
  Mbarrier full[kStages], empty[kStages];
};

__global__ void ring_kernel(const Quad* in, int tiles, float* out) {
  AREAL_DYNAMIC_SHARED(Ring, ring);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(&ring->full[s], 1);
      mbarrier_init(&ring->empty[s], blockDim.x);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  const auto load = [&](int tile) {
    Mbarrier* full = &ring->full[tile % kStages];
    mbarrier_arrive_expect(full, sizeof ring->tiles[0]);
    bulk_load(ring->tiles[tile % kStages], in + int64_t{tile} * kTile, sizeof ring->tiles[0], full);
  };
  for (int tile = 0; thread == 0 && tile < min(kStages, tiles); ++tile) load(tile);
  float sum = 0.0f;
  for (int tile = 0; tile < tiles; ++tile) {
    const int stage = tile % kStages;
    const unsigned parity = tile / kStages % 2;
    mbarrier_wait(&ring->full[stage], parity);
    for (int q = thread; q < kTile; q += static_cast<int>(blockDim.x)) {
      for (const float x : ring->tiles[stage][q].x) sum += x;
    }
    mbarrier_arrive(&ring->empty[stage]);
    if (thread == 0 && tile + kStages < tiles) {
      mbarrier_wait(&ring->empty[stage], parity);
      load(tile + kStages);
    }
  }
  atomicAdd(out, sum);
}

TEST(BulkCopy, ARingOfTilesIsReadWhileOthersAreUnderWay) {
  for (const int tiles : {1, 2, 3, 4, 10}) {
    const std::vector<Quad> in = iota(static_cast<size_t>(tiles) * kTile);
    const double n = 4.0 * kTile * tiles;
    cuda_shim::for_each_order([&] {
      float out = 0.0f;
      AREAL_LAUNCH(ring_kernel, 1, 96, sizeof(Ring), nullptr, in.data(), tiles, &out);
      EXPECT_NEAR(out, n * (n - 1) / 2, 1e-6 * n * n);
    });
  }
}

// Doubles a tile in shared memory and stores it; the tile is used again as soon as it has been read.
__global__ void store_kernel(Quad* data, int tiles) {
  AREAL_DYNAMIC_SHARED(Quad, tile);
  auto* full = reinterpret_cast<Mbarrier*>(tile + kTile);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    mbarrier_init(full, 1);
    mbarrier_init_fence();
  }
  for (int t = 0; t < tiles; ++t) {
    __syncthreads();
    if (thread == 0) {
      mbarrier_arrive_expect(full, kTile * sizeof(Quad));
      bulk_load(tile, data + t * kTile, kTile * sizeof(Quad), full);
    }
    mbarrier_wait(full, t % 2);
    for (float& x : tile[thread].x) x *= 2.0f;
    fence_async_proxy();
    __syncthreads();
    if (thread == 0) {
      bulk_store(data + t * kTile, tile, kTile * sizeof(Quad));
      bulk_commit();
      bulk_wait_read<0>();
    }
  }
  if (thread == 0) bulk_wait<0>();
}

TEST(BulkCopy, StoresWhatThreadsWrote) {
  const int tiles = 5;
  cuda_shim::for_each_order([&] {
    std::vector<Quad> data = iota(static_cast<size_t>(tiles) * kTile);
    AREAL_LAUNCH(store_kernel, 1, kTile, kTile * sizeof(Quad) + sizeof(Mbarrier), nullptr, data.data(), tiles);
    for (int i = 0; i < 4 * kTile * tiles; ++i) ASSERT_EQ(data[i / 4].x[i % 4], 2.0f * static_cast<float>(i));
  });
}

// The blocks of a cluster hand a value round by arriving at each other's mbarriers.
__global__ void relay_kernel(int* out) {
  AREAL_DYNAMIC_SHARED(Mbarrier, turn);
  auto* value = reinterpret_cast<int*>(turn + 1);
  if (threadIdx.x == 0) {
    mbarrier_init(turn, 1);
    mbarrier_init_fence();
  }
  cluster_arrive();
  cluster_wait();
  if (threadIdx.x == 0) {
    if (cluster_rank() != 0) mbarrier_wait(turn, 0);
    const int got = cluster_rank() == 0 ? 100 : *value;
    if (cluster_rank() + 1 < cluster_size()) {
      *map_shared(value, cluster_rank() + 1) = got + 1;
      mbarrier_arrive_at(turn, cluster_rank() + 1);
    }
    out[cluster_rank()] = got;
  }
  cluster_arrive();
  cluster_wait();
}

TEST(Cluster, ArrivesAtAnotherBlocksMbarrier) {
  cuda_shim::for_each_order([&] {
    std::vector<int> out(4);
    AREAL_LAUNCH_CLUSTERS(relay_kernel, (ClusterShape{4, 32, 16}), 1u, nullptr, out.data());
    EXPECT_EQ(out, (std::vector<int>{100, 101, 102, 103}));
  });
}

__global__ void match_kernel(unsigned* any, unsigned* all, int* equal) {
  const unsigned lane = threadIdx.x;
  any[lane] = __match_any_sync(kFullWarp, lane % 3);
  all[lane] = __match_all_sync(kFullWarp, lane / 32, &equal[lane]);
  all[lane] |= __match_all_sync(kFullWarp, lane / 31, &equal[32 + lane]);
}

TEST(Warp, MatchesValues) {
  cuda_shim::for_each_order([&] {
    std::vector<unsigned> any(32), all(32);
    std::vector<int> equal(64);
    AREAL_LAUNCH(match_kernel, 1, 32, 0, nullptr, any.data(), all.data(), equal.data());
    for (unsigned lane = 0; lane < 32; ++lane) {
      EXPECT_EQ(any[lane], 0x49249249u << lane % 3);
      EXPECT_EQ(all[lane], kFullWarp);
      EXPECT_EQ(equal[lane], 1);
      EXPECT_EQ(equal[32 + lane], 0);
    }
  });
}

}  // namespace
}  // namespace areal::cuda
