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

// Orders non-temporal stores of this thread before its later stores.
void store_fence();

// `count` runs of `run_bytes`, the strides apart. A null target: the bytes are hashed, not copied.
struct ByteRows {
  void* target;
  const void* source;
  int64_t target_stride;
  int64_t source_stride;
  size_t run_bytes;
  size_t count;
};

// The same hash over bytes that come in pieces.
class Xxh3Stream {
 public:
  // bytes: of all pieces together.
  explicit Xxh3Stream(size_t bytes);

  void take(const void* source, size_t bytes) { copy(nullptr, source, bytes, Stores::kCached); }
  // Takes the bytes and copies them. Non-temporal stores where the target is 64-byte aligned whenever a stripe begins
  // (every 64 bytes of all pieces); a store_fence() publishes them.
  void copy(void* target, const void* source, size_t bytes, Stores stores);
  // Takes rows in one pass and returns how many: none unless run_bytes and what was taken so far are multiples of 64,
  // and never the row that holds the last byte of all. Non-temporal where the target and its stride are, too.
  size_t copy_rows(const ByteRows& rows, Stores stores);
  size_t taken_bytes() const { return taken_; }
  // xxh3_64 of all pieces. Throws areal::Error when bytes are missing.
  uint64_t finish();

 private:
  size_t take_whole_stripes(uint8_t* to, const uint8_t* from, size_t bytes, Stores stores);
  size_t take_part(const uint8_t* from, size_t bytes);

  alignas(64) uint64_t accumulators_[8];
  alignas(64) uint8_t held_[256];  // the stripe taken last and what follows it; all of a short input
  size_t bytes_;
  size_t taken_ = 0;
};

}  // namespace areal::reshard
