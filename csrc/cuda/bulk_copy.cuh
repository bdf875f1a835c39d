// Bulk copies between global and shared memory (sm_90), and the mbarriers on which loads complete: one thread asks for
// kilobytes, and nobody waits until the data is needed. Addresses and sizes are multiples of 16 bytes, a phase of an
// mbarrier expects less than 1 MiB. Files that include this are
// CUDA_SM90 sources (cmake/ArealSources.cmake).
//
//   if (thread == 0) mbarrier_init(&full, 1), mbarrier_init_fence();
//   __syncthreads();
//   if (thread == 0) mbarrier_arrive_expect(&full, bytes), bulk_load(tile, row, bytes, &full);
//   mbarrier_wait(&full, 0);  // every thread that reads the tile; then 1, 0, 1, ... for the loads that follow
//
// Source: PTX ISA, cp.async.bulk and mbarrier.
#pragma once

#include "cuda/cluster.cuh"
#include "cuda/port.cuh"

namespace areal::cuda {

inline constexpr int kBulkUnit = 16;  // bytes

// In dynamic shared memory.
struct alignas(8) Mbarrier {
  uint64_t opaque;
};

#if defined(__CUDACC__)
__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}
#endif

// A phase ends when `arrivals` threads have arrived and the bytes that they announced have come.
__device__ __forceinline__ void mbarrier_init(Mbarrier* barrier, unsigned arrivals AREAL_AND_CALLER) {
#if !defined(__CUDACC__)
  cuda_shim::mbarrier_init(barrier, arrivals, CUDA_SHIM_HERE);
#else
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
#endif
}

// By the thread that initialised them, before other blocks and bulk copies use them.
__device__ __forceinline__ void mbarrier_init_fence() {
#if !defined(__CUDACC__)
  cuda_shim::mbarrier_init_fence();
#else
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// What the thread did before is visible to those that wait for the end of the phase.
__device__ __forceinline__ void mbarrier_arrive(Mbarrier* barrier AREAL_AND_CALLER) {
#if !defined(__CUDACC__)
  cuda_shim::mbarrier_arrive(barrier, cluster_rank(), 0, CUDA_SHIM_HERE);
#else
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
#endif
}

// Likewise at the barrier that the block of that rank has at the same place.
__device__ __forceinline__ void mbarrier_arrive_at(Mbarrier* barrier, unsigned rank AREAL_AND_CALLER) {
#if !defined(__CUDACC__)
  cuda_shim::mbarrier_arrive(barrier, rank, 0, CUDA_SHIM_HERE);
#else
  unsigned remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(barrier)), "r"(rank));
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(remote) : "memory");
#endif
}

// Arrives and announces so many bytes of bulk loads to the current phase.
__device__ __forceinline__ void mbarrier_arrive_expect(Mbarrier* barrier, unsigned bytes AREAL_AND_CALLER) {
#if !defined(__CUDACC__)
  cuda_shim::mbarrier_arrive(barrier, cluster_rank(), bytes, CUDA_SHIM_HERE);
#else
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
#endif
}

// Waits for the end of a phase: parity 0 for the first, 1 for the second, 0 for the third.
__device__ __forceinline__ void mbarrier_wait(Mbarrier* barrier, unsigned parity AREAL_AND_CALLER) {
#if !defined(__CUDACC__)
  cuda_shim::mbarrier_wait(barrier, parity, CUDA_SHIM_HERE);
#else
  const unsigned address = shared_address(barrier);
  unsigned ended = 0;
  while (ended == 0) {
    asm volatile(
        "{\n"
        "  .reg .pred p;\n"
        "  mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "  selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(ended)
        : "r"(address), "r"(parity)
        : "memory");
  }
#endif
}

// Starts a copy into the block's shared memory; the barrier's phase receives its bytes when it is done.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, unsigned bytes,
                                          Mbarrier* barrier AREAL_AND_CALLER) {
#if !defined(__CUDACC__)
  cuda_shim::bulk_load(shared, global, bytes, barrier, CUDA_SHIM_HERE);
#else
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
#endif
}

// Before a bulk store of what threads wrote: each writer fences, then a barrier, then one thread stores.
__device__ __forceinline__ void fence_async_proxy() {
#if !defined(__CUDACC__)
  cuda_shim::fence_async_proxy();
#else
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Starts a copy out of shared memory, as part of the thread's open group.
__device__ __forceinline__ void bulk_store(void* global, const void* shared, unsigned bytes AREAL_AND_CALLER) {
#if !defined(__CUDACC__)
  cuda_shim::bulk_store(global, shared, bytes, CUDA_SHIM_HERE);
#else
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(global)),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
#endif
}

// Closes the thread's group of stores.
__device__ __forceinline__ void bulk_commit() {
#if !defined(__CUDACC__)
  cuda_shim::bulk_commit();
#else
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}

// Waits until at most kPending of the thread's latest groups are under way: until the others are in global memory, or
// only (bulk_wait_read) until they have read their shared memory, which may then be written, and the block may exit.
template <int kPending>
__device__ __forceinline__ void bulk_wait() {
#if !defined(__CUDACC__)
  cuda_shim::bulk_wait(kPending, false);
#else
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
#if !defined(__CUDACC__)
  cuda_shim::bulk_wait(kPending, true);
#else
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
#endif
}

}  // namespace areal::cuda
