// Philox4x32-10: a counter-based generator. The draw for a token is a function of (seed, request, sample, position)
// alone, so it is the same whatever else is in the batch. Source: Salmon et al., "Parallel random numbers: as easy as
// 1, 2, 3" (SC 2011).
#pragma once

#include <array>
#include <cstdint>

namespace areal::decode {

inline std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * counter[0], b = uint64_t{0xCD9E8D57u} * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return counter;
}

// Uniform in [0, 1), 53 bits.
inline double philox_uniform(uint64_t seed, uint64_t request, uint32_t sample, uint32_t position) {
  const auto low = [](uint64_t x) { return static_cast<uint32_t>(x); };
  const auto high = [](uint64_t x) { return static_cast<uint32_t>(x >> 32); };
  const auto word = philox4x32({low(request), high(request), sample, position}, {low(seed), high(seed)});
  return static_cast<double>((uint64_t{word[0]} << 21) ^ (word[1] >> 11)) * 0x1p-53;
}

}  // namespace areal::decode
