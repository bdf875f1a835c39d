#include "reshard/xxh3.h"

#include <bit>
#include <cstring>

#include "reshard/xxh3_isa.h"

static_assert(std::endian::native == std::endian::little, "XXH3 here reads words in native order");

namespace areal::reshard {

alignas(64) const uint8_t kXxh3Secret[kSecretBytes] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4,
    0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e,
    0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43,
    0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb,
    0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19,
    0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7,
    0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78,
    0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16,
    0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

namespace {

constexpr uint64_t kPrime32_1 = 0x9E3779B1u, kPrime32_2 = 0x85EBCA77u, kPrime32_3 = 0xC2B2AE3Du;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87u, kPrime64_2 = 0xC2B2AE3D27D4EB4Fu, kPrime64_3 = 0x165667B19E3779F9u,
                   kPrime64_4 = 0x85EBCA77C2B2AE63u, kPrime64_5 = 0x27D4EB2F165667C5u;
constexpr size_t kLongAbove = 240;

uint64_t read32(const uint8_t* p) {
  uint32_t v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
uint64_t read64(const uint8_t* p) {
  uint64_t v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
uint64_t secret64(size_t at) { return read64(kXxh3Secret + at); }

uint64_t multiply_fold(uint64_t a, uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}
uint64_t avalanche(uint64_t h) {
  h = (h ^ (h >> 37)) * 0x165667919E3779F9u;
  return h ^ (h >> 32);
}
uint64_t avalanche_xxh64(uint64_t h) {
  h = (h ^ (h >> 33)) * kPrime64_2;
  h = (h ^ (h >> 29)) * kPrime64_3;
  return h ^ (h >> 32);
}
uint64_t mix16(const uint8_t* p, size_t secret) {
  return multiply_fold(read64(p) ^ secret64(secret), read64(p + 8) ^ secret64(secret + 8));
}

uint64_t hash_to_16(const uint8_t* p, size_t n) {
  if (n > 8) {
    const uint64_t low = read64(p) ^ secret64(24) ^ secret64(32);
    const uint64_t high = read64(p + n - 8) ^ secret64(40) ^ secret64(48);
    return avalanche(n + __builtin_bswap64(low) + high + multiply_fold(low, high));
  }
  if (n >= 4) {
    uint64_t h = (read32(p + n - 4) + (read32(p) << 32)) ^ secret64(8) ^ secret64(16);
    h ^= std::rotl(h, 49) ^ std::rotl(h, 24);
    h *= 0x9FB21C651E98DF25u;
    h = (h ^ ((h >> 35) + n)) * 0x9FB21C651E98DF25u;
    return h ^ (h >> 28);
  }
  if (n > 0) {
    const uint64_t combined = uint64_t{p[0]} << 16 | uint64_t{p[n >> 1]} << 24 | p[n - 1] | uint64_t{n} << 8;
    return avalanche_xxh64(combined ^ read32(kXxh3Secret) ^ read32(kXxh3Secret + 4));
  }
  return avalanche_xxh64(secret64(56) ^ secret64(64));
}

uint64_t hash_17_to_128(const uint8_t* p, size_t n) {
  uint64_t h = n * kPrime64_1;
  for (size_t i = (n - 1) / 32 + 1; i-- > 0;) h += mix16(p + 16 * i, 32 * i) + mix16(p + n - 16 * (i + 1), 32 * i + 16);
  return avalanche(h);
}

uint64_t hash_129_to_240(const uint8_t* p, size_t n) {
  uint64_t h = n * kPrime64_1;
  for (size_t i = 0; i < 8; ++i) h += mix16(p + 16 * i, 16 * i);
  h = avalanche(h);
  for (size_t i = 8; i < n / 16; ++i) h += mix16(p + 16 * i, 16 * (i - 8) + 3);
  return avalanche(h + mix16(p + n - 16, 136 - 17));
}

size_t whole_stripes(uint64_t* accumulators, uint8_t* target, const uint8_t* source, size_t bytes,
                     StripeStores stores) {
  AREAL_ISA_DISPATCH(xxh3_stripes(accumulators, target, source, bytes, stores));
}

// The tail beyond the whole stripes is copied before it is hashed, and hashed where it was copied to.
uint64_t hash_long(uint8_t* target, const uint8_t* source, size_t n, StripeStores stores) {
  alignas(64) uint64_t acc[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                                 kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
  const size_t done = whole_stripes(acc, target, source, n, stores);
  const uint8_t* hashed = source;
  if (stores != StripeStores::kNone) {
    std::memcpy(target + done, source + done, n - done);
    hashed = target;
  }
  const uint8_t* last = hashed + n - kStripeBytes;
  for (size_t i = 0; i < 8; ++i) {
    const uint64_t value = read64(last + 8 * i), key = value ^ secret64(kSecretBytes - kStripeBytes - 7 + 8 * i);
    acc[i ^ 1] += value;
    acc[i] += (key & 0xffffffffu) * (key >> 32);
  }
  uint64_t h = n * kPrime64_1;
  for (size_t i = 0; i < 4; ++i) {
    h += multiply_fold(acc[2 * i] ^ secret64(11 + 16 * i), acc[2 * i + 1] ^ secret64(19 + 16 * i));
  }
  return avalanche(h);
}

uint64_t hash_short(const uint8_t* p, size_t n) {
  if (n <= 16) return hash_to_16(p, n);
  if (n <= 128) return hash_17_to_128(p, n);
  return hash_129_to_240(p, n);
}

}  // namespace

uint64_t xxh3_64(const void* data, size_t bytes) {
  const auto* p = static_cast<const uint8_t*>(data);
  return bytes <= kLongAbove ? hash_short(p, bytes) : hash_long(nullptr, p, bytes, StripeStores::kNone);
}

uint64_t copy_with_xxh3(void* target, const void* source, size_t bytes, Stores stores) {
  auto* to = static_cast<uint8_t*>(target);
  const auto* from = static_cast<const uint8_t*>(source);
  if (bytes <= kLongAbove) {
    if (bytes > 0) std::memcpy(to, from, bytes);
    return hash_short(to, bytes);
  }
  const bool past_cache = stores == Stores::kNonTemporal && reinterpret_cast<uintptr_t>(target) % kStripeBytes == 0;
  return hash_long(to, from, bytes, past_cache ? StripeStores::kNonTemporal : StripeStores::kCached);
}

}  // namespace areal::reshard
