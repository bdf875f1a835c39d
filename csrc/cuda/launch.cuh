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

// Whether the current device has clusters, distributed shared memory and bulk copies.
inline bool has_clusters() {
  int device = 0, major = 0;
  check(cudaGetDevice(&device), "cudaGetDevice", __FILE__, __LINE__);
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute", __FILE__,
        __LINE__);
  return major >= 9;
}

// Dynamic shared memory that one block can have when its kernel opts in, less what the runtime keeps for itself.
inline int64_t max_dynamic_shared_bytes() {
  int device = 0, bytes = 0;
  check(cudaGetDevice(&device), "cudaGetDevice", __FILE__, __LINE__);
  check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "cudaDeviceGetAttribute",
        __FILE__, __LINE__);
  return bytes;
}

// How a kernel is launched in clusters of `cluster` blocks along x.
struct ClusterShape {
  unsigned cluster;
  unsigned threads;      // a block
  int64_t shared_bytes;  // dynamic, a block
};

#if defined(__CUDACC__)
// Lets the kernel have the shape's shared memory, and calls use(config) with its launch configuration.
template <class Kernel, class Use>
void with_cluster_config(Kernel kernel, const ClusterShape& shape, unsigned clusters, cudaStream_t stream, Use&& use) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shape.shared_bytes)),
        "cudaFuncSetAttribute", __FILE__, __LINE__);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {shape.cluster, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(clusters * shape.cluster);
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  use(config);
}

// Clusters of this shape that the device runs at a time.
template <class Kernel>
int max_active_clusters(Kernel kernel, const ClusterShape& shape) {
  int clusters = 0;
  with_cluster_config(kernel, shape, 1, nullptr, [&](const cudaLaunchConfig_t& config) {
    check(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config), "cudaOccupancyMaxActiveClusters", __FILE__,
          __LINE__);
  });
  return clusters;
}

template <class... Params, class... Args>
void launch_clusters(const char* name, void (*kernel)(Params...), const ClusterShape& shape, unsigned clusters,
                     cudaStream_t stream, Args&&... args) {
  with_cluster_config(kernel, shape, clusters, stream, [&](const cudaLaunchConfig_t& config) {
    check(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...), name, __FILE__, __LINE__);
  });
}
#else
template <class Kernel>
int max_active_clusters(Kernel, const ClusterShape&) {
  return 2;  // so that persistent clusters loop in tests
}

template <class... Params, class... Args>
void launch_clusters(const char* name, void (*kernel)(Params...), const ClusterShape& shape, unsigned clusters,
                     cudaStream_t, Args&&... args) {
  const auto bytes = static_cast<size_t>(shape.shared_bytes);
  AREAL_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)) == cudaSuccess,
      name, ": expected at most ", max_dynamic_shared_bytes(), " bytes of shared memory, got ", bytes);
  ::cuda_shim::launch_clusters(name, kernel, dim3(clusters * shape.cluster), dim3(shape.cluster), dim3(shape.threads),
                               bytes, args...);
}
#endif

}  // namespace areal::cuda

#define AREAL_CUDA_CHECK(call) ::areal::cuda::check((call), #call, __FILE__, __LINE__)

// AREAL_LAUNCH_CLUSTERS(kernel, shape, clusters, stream, args...): likewise, so many clusters of this ClusterShape.
#define AREAL_LAUNCH_CLUSTERS(kernel, shape, clusters, stream, ...) \
  ::areal::cuda::launch_clusters(#kernel, (kernel), (shape), (clusters), (stream)__VA_OPT__(, ) __VA_ARGS__)

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
