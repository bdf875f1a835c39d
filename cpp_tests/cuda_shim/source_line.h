// Names of code and data for the race checker's reports. Internal to the shim.
#pragma once

#include <cstdint>
#include <string>

namespace cuda_shim::race {

uintptr_t program_start();

// "file.cuh:12" of the call before the return address, skipping frames inlined from the shim's own headers.
std::string source_line(uintptr_t return_address);

// "part" from the mangled name of a function's static variable; other names as they are.
std::string variable_name(const char* mangled);

}  // namespace cuda_shim::race
