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

}  // namespace areal::reshard

namespace areal {

// Feeds the first (bytes - 1) / 64 whole stripes of source to the eight accumulators, copying them to target on
// the way (unless kNone), and returns how many bytes that were. Needs bytes > 240.
AREAL_ISA_DECLARE(size_t xxh3_stripes(uint64_t* accumulators, uint8_t* target, const uint8_t* source, size_t bytes,
                                      reshard::StripeStores stores))

}  // namespace areal
