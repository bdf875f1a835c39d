// The inner loop of XXH3 for inputs above 240 bytes, one build per instruction set. Private to xxh3.cpp.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/isa.h"

namespace areal::reshard {

inline constexpr size_t kStripeBytes = 64;
inline constexpr size_t kSecretBytes = 192;
inline constexpr size_t kStripesPerBlock = (kSecretBytes - kStripeBytes) / 8;
inline constexpr size_t kBlockBytes = kStripesPerBlock * kStripeBytes;

extern const uint8_t kXxh3Secret[kSecretBytes];

enum class StripeStores { kNone, kCached, kNonTemporal };

// `count` runs of `run_stripes` stripes, the strides (bytes) apart.
struct StripeRows {
  uint8_t* target;
  const uint8_t* source;
  int64_t target_stride;
  int64_t source_stride;
  size_t run_stripes;
  size_t count;
};

}  // namespace areal::reshard

namespace areal {

// Feeds the stripes to the eight accumulators, copying them on the way (unless kNone).
// first: how many stripes of the current block the accumulators have taken already, below kStripesPerBlock.
// kNonTemporal needs a 64-byte aligned target and target_stride, and a store_fence() before others may read it.
AREAL_ISA_DECLARE(void xxh3_stripes(uint64_t* accumulators, const reshard::StripeRows& rows, size_t first,
                                    reshard::StripeStores stores))

}  // namespace areal
