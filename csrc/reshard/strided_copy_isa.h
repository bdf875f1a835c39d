// The inner loops of strided_copy.cpp, one build per instruction set. Private to it.
#pragma once

#include <cstddef>

#include "base/isa.h"
#include "reshard/xxh3.h"

namespace areal {

// `count` runs of `run_bytes`, the strides apart, with ordinary stores.
AREAL_ISA_DECLARE(void copy_rows(const reshard::ByteRows& rows))
// Likewise past the cache. Needs target, target_stride and run_bytes to be multiples of 64.
AREAL_ISA_DECLARE(void stream_rows(const reshard::ByteRows& rows))
// One run of any alignment past the cache, but for what does not fill a line of the target.
AREAL_ISA_DECLARE(void stream_run(void* target, const void* source, size_t bytes))

}  // namespace areal
