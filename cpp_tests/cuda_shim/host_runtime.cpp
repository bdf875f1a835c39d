// The part of the CUDA runtime that launchers use, on host memory: streams run at once, copies are memcpy.
#include "host_runtime.h"

#include <cuda_runtime.h>

#include <cstring>
#include <map>

namespace cuda_shim {
namespace {

constexpr int kDefaultSharedBytes = 48 * 1024, kMaxSharedBytes = 227 * 1024;

std::map<const void*, int>& raised_limits() {
  static std::map<const void*, int> limits;
  return limits;
}

}  // namespace

size_t dynamic_shared_limit(const void* kernel) {
  const auto raised = raised_limits().find(kernel);
  return static_cast<size_t>(raised == raised_limits().end() ? kDefaultSharedBytes : raised->second);
}

}  // namespace cuda_shim

using cuda_shim::kDefaultSharedBytes;
using cuda_shim::kMaxSharedBytes;

extern "C" {

cudaError_t cudaGetLastError() { return cudaSuccess; }  // launches throw
cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "error under cuda_shim";
}
const char* cudaGetErrorName(cudaError_t error) { return error == cudaSuccess ? "cudaSuccess" : "cuda_shim"; }

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidDevice; }

// Few multiprocessors, so that small tests make persistent grids loop.
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = 4;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = kMaxSharedBytes;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = kDefaultSharedBytes;
      return cudaSuccess;
    case cudaDevAttrWarpSize:
      *value = 32;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      return cudaSuccess;
    default:
      return cudaErrorInvalidValue;
  }
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  if (value < 0 || value > kMaxSharedBytes) return cudaErrorInvalidValue;
  cuda_shim::raised_limits()[kernel] = value;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

cudaError_t cudaMemsetAsync(void* address, int value, size_t bytes, cudaStream_t) {
  std::memset(address, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}

}  // extern "C"
