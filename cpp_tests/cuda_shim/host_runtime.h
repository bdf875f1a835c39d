// What launches ask of the runtime's state. Internal to the shim.
#pragma once

#include <cstddef>

namespace cuda_shim {

// Dynamic shared memory that the kernel may have: 48 KiB until cudaFuncSetAttribute allows more.
size_t dynamic_shared_limit(const void* kernel);

}  // namespace cuda_shim
