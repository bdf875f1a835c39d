#include "reshard/xxh3.h"

#include <algorithm>
#include <bit>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "base/check.h"
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

constexpr uint64_t kFirstAccumulators[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                                            kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};

void take_stripes(uint64_t* accumulators, const StripeRows& rows, size_t first, StripeStores stores) {
  AREAL_ISA_DISPATCH(xxh3_stripes(accumulators, rows, first, stores));
}

StripeRows one_run(uint8_t* target, const uint8_t* source, size_t stripes) {
  const auto bytes = static_cast<int64_t>(stripes * kStripeBytes);
  return {target, source, bytes, bytes, stripes, 1};
}

// The stripes before the last 1 to 64 bytes.
size_t whole_stripes(size_t bytes) { return (bytes - 1) / kStripeBytes; }

// What is left once whole_stripes() have been taken. last: the final 64 of the n bytes.
uint64_t finish_long(uint64_t* acc, const uint8_t* last, size_t n) {
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

// The tail beyond the whole stripes is copied before it is hashed, and hashed where it was copied to.
uint64_t hash_long(uint8_t* target, const uint8_t* source, size_t n, StripeStores stores) {
  alignas(64) uint64_t acc[8];
  std::memcpy(acc, kFirstAccumulators, sizeof acc);
  take_stripes(acc, one_run(target, source, whole_stripes(n)), 0, stores);
  const uint8_t* hashed = source;
  if (stores != StripeStores::kNone) {
    const size_t done = whole_stripes(n) * kStripeBytes;
    std::memcpy(target + done, source + done, n - done);
    store_fence();
    hashed = target;
  }
  return finish_long(acc, hashed + n - kStripeBytes, n);
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

void store_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

namespace {

StripeStores stripe_stores(const void* target, int64_t stride, Stores stores) {
  if (target == nullptr) return StripeStores::kNone;
  const bool aligned = (reinterpret_cast<uintptr_t>(target) | static_cast<uintptr_t>(stride)) % kStripeBytes == 0;
  return stores == Stores::kNonTemporal && aligned ? StripeStores::kNonTemporal : StripeStores::kCached;
}

}  // namespace

uint64_t copy_with_xxh3(void* target, const void* source, size_t bytes, Stores stores) {
  auto* to = static_cast<uint8_t*>(target);
  const auto* from = static_cast<const uint8_t*>(source);
  if (bytes <= kLongAbove) {
    if (bytes > 0) std::memcpy(to, from, bytes);
    return hash_short(to, bytes);
  }
  return hash_long(to, from, bytes, stripe_stores(to, 0, stores));
}

Xxh3Stream::Xxh3Stream(size_t bytes) : bytes_(bytes) {
  std::memcpy(accumulators_, kFirstAccumulators, sizeof accumulators_);
}

void Xxh3Stream::copy(void* target, const void* source, size_t bytes, Stores stores) {
  AREAL_CHECK(bytes <= bytes_ - taken_, "Xxh3Stream: expected at most ", bytes_ - taken_, " more bytes, got ", bytes);
  auto* to = static_cast<uint8_t*>(target);
  const auto* from = static_cast<const uint8_t*>(source);
  while (bytes > 0) {
    size_t done = bytes_ <= kLongAbove ? 0 : take_whole_stripes(to, from, bytes, stores);
    if (done == 0) {
      done = take_part(from, bytes);
      if (to != nullptr) std::memcpy(to, from, done);
    }
    if (to != nullptr) to += done;
    from += done;
    bytes -= done;
  }
}

size_t Xxh3Stream::copy_rows(const ByteRows& rows, Stores stores) {
  const size_t done = taken_ / kStripeBytes, run_stripes = rows.run_bytes / kStripeBytes;
  if (bytes_ <= kLongAbove || (taken_ | rows.run_bytes) % kStripeBytes != 0 || done >= whole_stripes(bytes_)) return 0;
  const size_t count = std::min(rows.count, (whole_stripes(bytes_) - done) / run_stripes);
  if (count == 0) return 0;
  const auto* from = static_cast<const uint8_t*>(rows.source);
  take_stripes(accumulators_,
               {static_cast<uint8_t*>(rows.target), from, rows.target_stride, rows.source_stride, run_stripes, count},
               done % kStripesPerBlock, stripe_stores(rows.target, rows.target_stride, stores));
  const auto last_row = static_cast<int64_t>(count - 1);
  std::memcpy(held_, from + last_row * rows.source_stride + rows.run_bytes - kStripeBytes, kStripeBytes);
  taken_ += count * rows.run_bytes;
  return count;
}

// Straight from the source, when the bytes taken so far end with a stripe.
size_t Xxh3Stream::take_whole_stripes(uint8_t* to, const uint8_t* from, size_t bytes, Stores stores) {
  const size_t done = taken_ / kStripeBytes;
  const size_t run = std::min(bytes / kStripeBytes, whole_stripes(bytes_) - std::min(done, whole_stripes(bytes_)));
  if (run == 0) return 0;
  const size_t run_bytes = run * kStripeBytes;
  return run_bytes * copy_rows({to, from, 0, static_cast<int64_t>(run_bytes), run_bytes, 1}, stores);
}

// Into held_: all of a short input, or what does not end a stripe, behind the stripe before it.
size_t Xxh3Stream::take_part(const uint8_t* from, size_t bytes) {
  const bool is_short = bytes_ <= kLongAbove;
  const size_t part = taken_ % kStripeBytes;
  const size_t count = is_short ? bytes : std::min(bytes, kStripeBytes - part);
  std::memcpy(held_ + (is_short ? taken_ : kStripeBytes + part), from, count);
  taken_ += count;
  const size_t stripe = taken_ / kStripeBytes;
  if (is_short || taken_ % kStripeBytes != 0 || stripe > whole_stripes(bytes_)) return count;
  take_stripes(accumulators_, one_run(nullptr, held_ + kStripeBytes, 1), (stripe - 1) % kStripesPerBlock,
               StripeStores::kNone);
  std::memcpy(held_, held_ + kStripeBytes, kStripeBytes);
  return count;
}

uint64_t Xxh3Stream::finish() {
  AREAL_CHECK(taken_ == bytes_, "Xxh3Stream: expected ", bytes_, " bytes, got ", taken_);
  if (bytes_ <= kLongAbove) return hash_short(held_, bytes_);
  return finish_long(accumulators_, held_ + bytes_ - whole_stripes(bytes_) * kStripeBytes, bytes_);
}

}  // namespace areal::reshard
