// Hears of everything that orders memory accesses. race_checker.cpp implements it for the race build, race_off.cpp as
// no-ops for the others. Internal to the shim.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cuda_shim::race {

struct BlockMemory {
  const void* dynamic_shared;
  size_t dynamic_shared_bytes;
  const void* stacks;  // private to threads: not watched
  size_t stacks_bytes;
  const void* threads;  // the shim's own records: not watched
  size_t threads_bytes;
};

// Whether kernel code runs. What the shim does on a thread's behalf is not watched: the linker may have given it an
// instrumented copy of an inline function of the standard library.
void watch(bool on);
struct Unwatched {
  Unwatched() { watch(false); }
  Unwatched(const Unwatched&) = delete;
  Unwatched& operator=(const Unwatched&) = delete;
  ~Unwatched() { watch(true); }
};

void on_launch(const char* kernel);
void on_block(unsigned threads, const BlockMemory& memory);
void on_barrier();
void on_warp_sync(unsigned first_thread, uint32_t lanes);
void on_launch_end();  // throws Error when the launch had findings

}  // namespace cuda_shim::race
