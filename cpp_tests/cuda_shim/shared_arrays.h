// Where the __shared__ variables of this program's kernels are. Internal to the shim.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace cuda_shim {

struct SharedArray {
  char* address;  // as the calling OS thread sees it
  size_t bytes;
  std::string name;  // mangled
};

// Read once from the program's symbol table. Empty under AddressSanitizer, where they are plain statics.
const std::vector<SharedArray>& shared_arrays();

}  // namespace cuda_shim
