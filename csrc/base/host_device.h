// Marks row math shared by CPU and CUDA. Force-inlined on the host, so that an ISA source may use it without
// emitting an out-of-line copy (see base/isa.h).
#pragma once

#if defined(__CUDACC__)
#define AREAL_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define AREAL_HOST_DEVICE inline __attribute__((always_inline))
#endif
