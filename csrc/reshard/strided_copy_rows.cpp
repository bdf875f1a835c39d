#include <cstring>

#include "base/simd.h"
#include "reshard/strided_copy_isa.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace areal::AREAL_ISA {
namespace {

using reshard::ByteRows;

inline constexpr size_t kLine = 64;
inline constexpr size_t kVectorBytes = kLanes * 4;
// As in xxh3_stripes.cpp.
inline constexpr size_t kPrefetchBytes = 4096;
inline constexpr size_t kPrefetchRows = 32;

typedef uint8_t Bytes __attribute__((vector_size(kVectorBytes)));

AREAL_INLINE void store_past_cache(uint8_t* p, Bytes v) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(p), (__m512i)v);
#elif defined(__AVX2__)
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), (__m256i)v);
#elif defined(__SSE2__)
  _mm_stream_si128(reinterpret_cast<__m128i*>(p), (__m128i)v);
#else
  std::memcpy(p, &v, sizeof v);
#endif
}

template <class T>
AREAL_INLINE void move(uint8_t* target, const uint8_t* source) {
  T v;
  std::memcpy(&v, source, sizeof v);
  std::memcpy(target, &v, sizeof v);
}

AREAL_INLINE void stream_line(uint8_t* target, const uint8_t* source) {
  for (size_t at = 0; at < kLine; at += kVectorBytes) {
    Bytes v;
    std::memcpy(&v, source + at, sizeof v);
    store_past_cache(target + at, v);
  }
}

// Two moves that overlap cover any length from one to two times theirs.
template <class T>
AREAL_INLINE void move_ends(uint8_t* target, const uint8_t* source, size_t bytes) {
  T first, last;
  std::memcpy(&first, source, sizeof first);
  std::memcpy(&last, source + bytes - sizeof last, sizeof last);
  std::memcpy(target, &first, sizeof first);
  std::memcpy(target + bytes - sizeof last, &last, sizeof last);
}

typedef uint8_t Bytes16 __attribute__((vector_size(16)));

// bytes < 2 * kVectorBytes.
AREAL_INLINE void move_short(uint8_t* target, const uint8_t* source, size_t bytes) {
  if (bytes >= kVectorBytes) return move_ends<Bytes>(target, source, bytes);
  if constexpr (kVectorBytes > 32) {
    typedef uint8_t Bytes32 __attribute__((vector_size(32)));
    if (bytes >= 32) return move_ends<Bytes32>(target, source, bytes);
  }
  if constexpr (kVectorBytes > 16) {
    if (bytes >= 16) return move_ends<Bytes16>(target, source, bytes);
  }
  if (bytes >= 8) return move_ends<uint64_t>(target, source, bytes);
  if (bytes >= 4) return move_ends<uint32_t>(target, source, bytes);
  if (bytes >= 2) return move_ends<uint16_t>(target, source, bytes);
  if (bytes == 1) *target = *source;
}

AREAL_INLINE void move_run(uint8_t* target, const uint8_t* source, size_t bytes) {
  while (bytes >= 2 * kVectorBytes) {
    move<Bytes>(target, source);
    target += kVectorBytes;
    source += kVectorBytes;
    bytes -= kVectorBytes;
  }
  move_short(target, source, bytes);
}

// run(target, source) once per row, asking for the source of a later one.
template <class Run>
AREAL_INLINE void for_each_row(const ByteRows& rows, const Run& run) {
  const size_t later = kPrefetchBytes / rows.run_bytes;
  const auto ahead = static_cast<int64_t>(later < kPrefetchRows ? later : kPrefetchRows) * rows.source_stride;
  auto* target = static_cast<uint8_t*>(rows.target);
  const auto* source = static_cast<const uint8_t*>(rows.source);
  for (size_t i = 0; i < rows.count; ++i) {
    for (size_t at = 0; at < rows.run_bytes; at += kLine) __builtin_prefetch(source + ahead + at, 0, 3);
    run(target, source);
    target += rows.target_stride;
    source += rows.source_stride;
  }
}

template <size_t kBytes>
void copy_rows_of(const ByteRows& rows) {
  for_each_row(rows, [](uint8_t* target, const uint8_t* source) {
    if constexpr (kBytes >= kVectorBytes) {
      for (size_t at = 0; at < kBytes; at += kVectorBytes) move<Bytes>(target + at, source + at);
    } else {
      std::memcpy(target, source, kBytes);
    }
  });
}

}  // namespace

void copy_rows(const ByteRows& rows) {
  switch (rows.run_bytes) {
    case 1:
      return copy_rows_of<1>(rows);
    case 2:
      return copy_rows_of<2>(rows);
    case 4:
      return copy_rows_of<4>(rows);
    case 8:
      return copy_rows_of<8>(rows);
    case 16:
      return copy_rows_of<16>(rows);
    case 32:
      return copy_rows_of<32>(rows);
    case 64:
      return copy_rows_of<64>(rows);
    case 128:
      return copy_rows_of<128>(rows);
    case 256:
      return copy_rows_of<256>(rows);
    default:
      break;
  }
  for_each_row(rows, [&](uint8_t* target, const uint8_t* source) { move_run(target, source, rows.run_bytes); });
}

void stream_rows(const ByteRows& rows) {
  for_each_row(rows, [&](uint8_t* target, const uint8_t* source) {
    for (size_t at = 0; at < rows.run_bytes; at += kLine) stream_line(target + at, source + at);
  });
}

void stream_run(void* to, const void* from, size_t bytes) {
  auto* target = static_cast<uint8_t*>(to);
  const auto* source = static_cast<const uint8_t*>(from);
  const size_t head = (kLine - reinterpret_cast<uintptr_t>(target) % kLine) % kLine;
  if (bytes < head + kLine) return move_run(target, source, bytes);
  move_run(target, source, head);
  size_t at = head;
  for (; at + kLine <= bytes; at += kLine) {
    __builtin_prefetch(source + at + kPrefetchBytes, 0, 2);
    stream_line(target + at, source + at);
  }
  move_run(target + at, source + at, bytes - at);
}

}  // namespace areal::AREAL_ISA
