// From the instrumentation's hooks to the race checker. Internal to the shim.
#pragma once

#include <cstddef>

namespace cuda_shim::race {

void on_access(const void* address, size_t bytes, bool writes, const void* pc);

}  // namespace cuda_shim::race
