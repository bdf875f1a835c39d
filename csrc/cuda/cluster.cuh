// Clusters of thread blocks (sm_90): blocks that run together on one part of the device and reach each other's shared
// memory. Kernels that use them keep what they share in dynamic shared memory, and launch with AREAL_LAUNCH_CLUSTERS.
// Files that include this are CUDA_SM90 sources (cmake/ArealSources.cmake).
//
// Source: CUDA C++ Programming Guide, "Thread Block Clusters" and "Distributed Shared Memory"; PTX ISA,
// barrier.cluster and mapa.
#pragma once

#include "cuda/port.cuh"
#include "cuda/reduce.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#error "clusters need sm_90: list the .cu file as CUDA_SM90"
#endif

namespace areal::cuda {

// Blocks in the cluster, the calling one's index among them; clusters in the grid, the calling one's index.
__device__ __forceinline__ unsigned cluster_size() {
#if !defined(__CUDACC__)
  return cuda_shim::current->cluster_size;
#else
  unsigned size;
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
  return size;
#endif
}
__device__ __forceinline__ unsigned cluster_rank() {
#if !defined(__CUDACC__)
  return cuda_shim::current->cluster_rank;
#else
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
#endif
}
__device__ __forceinline__ unsigned cluster_count() { return gridDim.x / cluster_size(); }
__device__ __forceinline__ unsigned cluster_index() { return blockIdx.x / cluster_size(); }

// The cluster's barrier, in two halves: what a thread did before it arrived is visible to those that have waited. Every
// thread of every block alternates between the two. A block may touch another's shared memory after the first barrier
// (before, the other may not have started) and until the last one (then it may have exited).
__device__ __forceinline__ void cluster_arrive(AREAL_CALLER) {
#if !defined(__CUDACC__)
  cuda_shim::cluster_arrive(CUDA_SHIM_HERE);
#else
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait(AREAL_CALLER) {
#if !defined(__CUDACC__)
  cuda_shim::cluster_wait(CUDA_SHIM_HERE);
#else
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// Where the block of that rank has what p points to in the calling block's dynamic shared memory.
template <class T>
__device__ __forceinline__ T* map_shared(T* p, unsigned rank AREAL_AND_CALLER) {
#if !defined(__CUDACC__)
  return static_cast<T*>(cuda_shim::map_shared(p, rank, CUDA_SHIM_HERE));
#else
  T* mapped;
  asm("mapa.u64 %0, %1, %2;" : "=l"(mapped) : "l"(p), "r"(rank));
  return mapped;
#endif
}

// A reduction over the cluster in two halves, with the cluster's barrier between them. `slots` is dynamic shared memory
// of this reduction alone, one T for each block; it may be used again once every block has passed the next barrier.
//
// First half: one warp of each block calls it with the block's value in lane 0.
template <class T>
__device__ __forceinline__ void cluster_publish(const T& value, T* slots) {
  const unsigned lane = threadIdx.x % kWarp;
  const T shared = broadcast(value);
  if (lane < cluster_size()) *map_shared(slots + cluster_rank(), lane) = shared;
}

// Second half: one warp calls it; the merged value, in order of rank whatever the timing, is in lane 0.
template <class T, class Merge>
__device__ __forceinline__ T cluster_collect(const T* slots, const T& identity, const Merge& merge) {
  const unsigned lane = threadIdx.x % kWarp;
  return warp_reduce(lane < cluster_size() ? slots[lane] : identity, merge);
}

}  // namespace areal::cuda
