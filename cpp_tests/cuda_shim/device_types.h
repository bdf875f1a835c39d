// CUDA's qualifiers, vector types and half types for a host compiler. Types come from the toolkit's own headers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __forceinline__
#undef __launch_bounds__
#undef __grid_constant__
#define __global__
#define __device__
#define __host__
#define __constant__ const
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)

// AddressSanitizer puts redzones round plain statics only. Elsewhere thread_local tells shared arrays from other
// statics, so that they can be filled with NaN and watched by the race checker.
#if defined(CUDA_SHIM_ASAN)
#define __shared__ static
#else
#define __shared__ static thread_local
#endif

#define threadIdx (::cuda_shim::current->thread_index)
#define blockIdx (::cuda_shim::current->block_index)
#define blockDim (::cuda_shim::current->block_dim)
#define gridDim (::cuda_shim::current->grid_dim)
#define warpSize 32

// cuda_runtime.h offers it to nvcc only.
template <class... Params>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Params...), cudaFuncAttribute attribute, int value) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}
