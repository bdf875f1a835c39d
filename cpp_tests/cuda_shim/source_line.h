// Names of code and data for the race checker's reports. Internal to the shim.
#pragma once

#include <cstdint>
#include <string>

namespace cuda_shim::race {

uintptr_t program_start();

// Where the call before the return address is: "vec.cuh:12 < x_kernels.cuh:34", a line and those it was inlined into,
// innermost first, without the shim's own headers.
std::string source_line(uintptr_t return_address);

// "part" from the mangled name of a function's static variable; other names as they are.
std::string variable_name(const char* mangled);

}  // namespace cuda_shim::race
