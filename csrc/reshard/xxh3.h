// XXH3-64 (seed 0, default secret), alone or fused into a copy. The same value on every instruction set.
// Source: xxHash specification, https://github.com/Cyan4973/xxHash (XXH3_64bits).
// It guards against accidents: torn copies, flipped bits, wrong offsets. It is no defence against an adversary.
#pragma once

#include <cstddef>
#include <cstdint>

namespace areal::reshard {

enum class Stores {
  kCached,       // ordinary stores: the bytes stay in this core's cache, best when they fit there
  kNonTemporal,  // past the cache: saves reading each line before it is overwritten, best for large copies
};

uint64_t xxh3_64(const void* data, size_t bytes);

// Copies `bytes` from source to target (which must not overlap) and returns xxh3_64 of what was stored. The hash
// is taken from the registers that were stored, so a source that changes meanwhile still matches its checksum.
// kNonTemporal needs a 64-byte aligned target (otherwise ordinary stores are used). On return every store of this
// call is ordered before later stores of this thread: release operations publish them.
uint64_t copy_with_xxh3(void* target, const void* source, size_t bytes, Stores stores);

}  // namespace areal::reshard
