// Hears of everything that orders memory accesses. race_checker.cpp implements it for the race build, race_off.cpp as
// no-ops for the others. Internal to the shim.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace cuda_shim::race {

struct Region {
  uintptr_t begin = 0;
  size_t bytes = 0;

  Region() = default;
  Region(const void* address, size_t size) : begin(reinterpret_cast<uintptr_t>(address)), bytes(size) {}
  bool contains(uintptr_t address) const { return address - begin < bytes; }
};

struct ClusterMemory {
  std::vector<uint3> blocks;           // their indices in the grid, by rank
  std::vector<Region> dynamic_shared;  // of each block
  unsigned slots_per_block;
  Region stacks;   // private to threads: not watched
  Region threads;  // the shim's own records: not watched
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
void on_cluster(const ClusterMemory& memory);
void on_barrier(unsigned block);
void on_warp_sync(unsigned first_slot, uint32_t lanes);
void on_block_exit(unsigned block);
std::string findings();  // of the launch so far, "" if none

// The running thread arrives at a point and waits for the end of its phase (happens_before.h).
void on_release(const void* point);
void on_end_phase(const void* point);
void on_acquire(const void* point);

// Bulk copies, by queue. An access is made in the name of the running thread.
unsigned add_queue();
void on_bulk_access(const void* address, size_t bytes, bool writes, unsigned queue, uint32_t clock, const void* pc);
void on_bulk_end(unsigned queue, uint32_t clock, const void* point);
void on_bulk_wait(unsigned queue, uint32_t clock);
// An initialisation of an mbarrier is a write of its word, every use an atomic access.
void on_mbarrier(const void* barrier, bool initialises, const void* pc);

}  // namespace cuda_shim::race
