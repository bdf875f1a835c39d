#include "engine.h"
#include "race_checker.h"

namespace cuda_shim {

void note_atomic(const void*, size_t, const void*) {}
void note_fence() {}

namespace race {
void watch(bool) {}
void on_launch(const char*) {}
void on_block(unsigned, const BlockMemory&) {}
void on_barrier() {}
void on_warp_sync(unsigned, uint32_t) {}
void on_launch_end() {}
}  // namespace race
}  // namespace cuda_shim
