// Runs CUDA kernels and their launchers on the CPU. csrc/cuda/port.cuh includes this header when a host compiler reads
// a kernel file, so that tests execute the very source that nvcc compiles, on host pointers.
//
// A CUDA thread is a fiber; the threads of a cluster's blocks, and the clusters of a grid, take turns on the calling OS
// thread. Threads change only where they synchronise, in an order the test chooses (orders.h), so every run can be
// repeated. Whatever CUDA leaves undefined is reported as cuda_shim::Error, or stops the test under ASan and UBSan:
// docs/testing_kernels.md lists what is found, by which of the three builds, and what is not covered.
//
//   device_types.h  qualifiers and built-in variables      fiber.*       stacks and switching
//   engine.h        what intrinsics ask of the scheduler   cluster.*     blocks that run together, scheduler
//   async.cpp       clusters, mbarriers and bulk copies    bulk_copies.* mbarriers, and copies under way
//   intrinsics.h    barriers, shuffles, votes, reductions  block.*       threads of a block and their barrier
//   atomics.h       atomics and fences                     warp.*        operations across the lanes of a warp
//   device_math.h   cached loads, fast maths, bits         launch.cpp    the grid
//   race_*          memory-order checker of the race build happens_before.*  what it takes for an order
//   host_runtime.*  the part of cudart that launchers use  shared_arrays.*  finds __shared__ variables
//
// Kernels, and every function that declares a __shared__ variable, belong in an anonymous namespace: the shim finds
// their shared arrays by that.
#pragma once

#include "atomics.h"
#include "device_math.h"
#include "device_types.h"
#include "engine.h"
#include "intrinsics.h"

// Declares `T* name` over the launch's dynamic shared memory.
#define AREAL_DYNAMIC_SHARED(T, name) T* name = reinterpret_cast<T*>(::cuda_shim::dynamic_shared())

// Marks the translation unit as one whose thread_local statics are __shared__ variables (shared_arrays.cpp).
[[gnu::used]] static const char cuda_shim_unit_marker = 0;
