// The sole CUDA include of the kernels. nvcc and `clang -x cuda` get the toolkit's headers; a host compiler gets
// cuda_shim.h of the tests, which runs the same source on the CPU. Kernel files write AREAL_DYNAMIC_SHARED for
// dynamic shared memory, and launchers AREAL_LAUNCH (launch.cuh), so that both read the same text.
#pragma once

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
// Declares `T* name`, 16-byte aligned, over the launch's dynamic shared memory.
#define AREAL_DYNAMIC_SHARED(T, name)                                    \
  extern __shared__ __align__(16) unsigned char areal_dynamic_shared_[]; \
  T* name = reinterpret_cast<T*>(areal_dynamic_shared_)
// Last parameters of a wrapper round an instruction: under the shim, the line that calls it.
#define AREAL_CALLER
#define AREAL_AND_CALLER
#else
#include "cuda_shim.h"
#define AREAL_CALLER CUDA_SHIM_CALLER
#define AREAL_AND_CALLER , CUDA_SHIM_CALLER
#endif

#include <cstdint>
