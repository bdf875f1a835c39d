// Words for diagnostics. Internal to the shim.
#pragma once

#include <cstdint>
#include <string>

#include "engine.h"

namespace cuda_shim {

class Block;
struct Thread;

std::string hex(uint32_t mask);
std::string to_string(Location where);  // "file.cuh:12"

// As fail(), for a thread that need not be the running one.
[[noreturn]] void fail_for(const Thread& self, const std::string& message, Location where);

// The headline, then each group of threads that waits at one place: warp, lanes, operation, missing lanes.
std::string describe_waiting_threads(const std::string& headline, const Block& block);

}  // namespace cuda_shim
