// How launchers start a kernel and report what the runtime said.
#pragma once

#include "base/check.h"
#include "cuda/port.cuh"

namespace areal::cuda {

// Throws areal::Error with the call site and CUDA's own text when status is not cudaSuccess.
inline void check(cudaError_t status, const char* what, const char* file, int line) {
  AREAL_CHECK(status == cudaSuccess, "CUDA: ", what, " failed with error ", static_cast<int>(status), " (",
              cudaGetErrorString(status), ") at ", file, ":", line);
}

// Streaming multiprocessors of the current device; 4 under the shim, so that persistent grids loop in tests.
inline int multiprocessor_count() {
  int device = 0, count = 0;
  check(cudaGetDevice(&device), "cudaGetDevice", __FILE__, __LINE__);
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute", __FILE__,
        __LINE__);
  return count;
}

}  // namespace areal::cuda

#define AREAL_CUDA_CHECK(call) ::areal::cuda::check((call), #call, __FILE__, __LINE__)

// AREAL_LAUNCH(kernel, grid, block, dynamic_shared_bytes, stream, args...): launches and checks; never synchronises.
#if defined(__CUDACC__)
#define AREAL_LAUNCH(kernel, grid, block, shared_bytes, stream, ...)                    \
  do {                                                                                  \
    (kernel)<<<(grid), (block), (shared_bytes), (stream)>>>(__VA_ARGS__);               \
    ::areal::cuda::check(cudaGetLastError(), "launch of " #kernel, __FILE__, __LINE__); \
  } while (false)
#else
#define AREAL_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  ((void)(stream), ::cuda_shim::launch(#kernel, (kernel), (grid), (block), (shared_bytes)__VA_OPT__(, ) __VA_ARGS__))
#endif
