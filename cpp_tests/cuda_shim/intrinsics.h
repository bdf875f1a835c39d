// Barriers, shuffles, votes and warp reductions.
#pragma once

#include <cstring>
#include <string>
#include <type_traits>

#include "engine.h"

namespace cuda_shim {

template <class T>
uint64_t to_bits(T value) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>, "warp operations move at most 8 bytes a lane");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}

template <class T>
T from_bits(uint64_t bits) {
  T value;
  std::memcpy(static_cast<void*>(&value), &bits, sizeof value);
  return value;
}

template <class T>
T shuffle(WarpOp op, uint32_t mask, T value, int source, Location where) {
  const LaneValues lanes = warp_meet(op, mask, to_bits(value), where);
  if (!(lanes.arrived >> source & 1)) {
    fail("shuffle reads lane " + std::to_string(source) + ", which took no part in it", where);
  }
  const T result = from_bits<T>(lanes.values[source]);
  warp_leave();
  return result;
}

// Bit i: lane i took part with a true predicate. *arrived: the lanes that took part.
inline uint32_t vote(WarpOp op, uint32_t mask, bool predicate, uint32_t* arrived, Location where) {
  const LaneValues lanes = warp_meet(op, mask, predicate, where);
  uint32_t votes = 0;
  for (int i = 0; i < 32; ++i) {
    if (lanes.arrived >> i & 1) votes |= static_cast<uint32_t>(lanes.values[i]) << i;
  }
  *arrived = lanes.arrived;
  warp_leave();
  return votes;
}

// The lanes with the calling one's value. *arrived, unless null: the lanes that took part.
template <class T>
uint32_t match(WarpOp op, uint32_t mask, T value, uint32_t* arrived, Location where) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "__match_*_sync takes values of 4 or 8 bytes");
  const LaneValues lanes = warp_meet(op, mask, to_bits(value), where);
  uint32_t same = 0;
  for (int i = 0; i < 32; ++i) {
    if ((lanes.arrived >> i & 1) && lanes.values[i] == to_bits(value)) same |= 1u << i;
  }
  if (arrived != nullptr) *arrived = lanes.arrived;
  warp_leave();
  return same;
}

template <class T, class Combine>
T warp_reduce(uint32_t mask, T value, Location where, Combine combine) {
  static_assert(std::is_integral_v<T> && sizeof(T) == 4, "__reduce_*_sync takes 32-bit integers");
  const LaneValues lanes = warp_meet(WarpOp::kReduce, mask, to_bits(value), where);
  T result{};
  bool first = true;
  for (int i = 0; i < 32; ++i) {
    if (!(lanes.arrived >> i & 1)) continue;
    const T lane_value = from_bits<T>(lanes.values[i]);
    result = first ? lane_value : combine(result, lane_value);
    first = false;
  }
  warp_leave();
  return result;
}

// The lane itself when the source falls outside its group of `width` lanes.
inline int clamped_source(int source, int width) {
  const int lane = static_cast<int>(current->lane), group = lane & ~(width - 1);
  return source < group || source >= group + width ? lane : source;
}

inline int lane_of_group(int index, int width) {
  return (static_cast<int>(current->lane) & ~(width - 1)) + (index & (width - 1));
}

}  // namespace cuda_shim

inline void __syncthreads(CUDA_SHIM_CALLER) {
  cuda_shim::block_barrier(cuda_shim::BarrierKind::kPlain, false, CUDA_SHIM_HERE);
}
inline int __syncthreads_count(int predicate, CUDA_SHIM_CALLER) {
  return cuda_shim::block_barrier(cuda_shim::BarrierKind::kCount, predicate != 0, CUDA_SHIM_HERE);
}
inline int __syncthreads_and(int predicate, CUDA_SHIM_CALLER) {
  return cuda_shim::block_barrier(cuda_shim::BarrierKind::kAnd, predicate != 0, CUDA_SHIM_HERE);
}
inline int __syncthreads_or(int predicate, CUDA_SHIM_CALLER) {
  return cuda_shim::block_barrier(cuda_shim::BarrierKind::kOr, predicate != 0, CUDA_SHIM_HERE);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, CUDA_SHIM_CALLER) {
  cuda_shim::warp_meet(cuda_shim::WarpOp::kSync, mask, 0, CUDA_SHIM_HERE);
  cuda_shim::warp_leave();
}

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, CUDA_SHIM_CALLER) {
  const int lane = cuda_shim::lane_of_group(source, width);
  return cuda_shim::shuffle(cuda_shim::WarpOp::kShuffle, mask, value, lane, CUDA_SHIM_HERE);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, CUDA_SHIM_CALLER) {
  const int lane = static_cast<int>(cuda_shim::current->lane), source = lane ^ lane_mask;
  // As on the device: an earlier group may be read, a later one may not.
  const int group_end = (lane & ~(width - 1)) + width;
  return cuda_shim::shuffle(cuda_shim::WarpOp::kShuffleXor, mask, value, source < group_end ? source : lane,
                            CUDA_SHIM_HERE);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, CUDA_SHIM_CALLER) {
  const int source = static_cast<int>(cuda_shim::current->lane) - static_cast<int>(delta);
  return cuda_shim::shuffle(cuda_shim::WarpOp::kShuffleUp, mask, value, cuda_shim::clamped_source(source, width),
                            CUDA_SHIM_HERE);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, CUDA_SHIM_CALLER) {
  const int source = static_cast<int>(cuda_shim::current->lane) + static_cast<int>(delta);
  return cuda_shim::shuffle(cuda_shim::WarpOp::kShuffleDown, mask, value, cuda_shim::clamped_source(source, width),
                            CUDA_SHIM_HERE);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, CUDA_SHIM_CALLER) {
  uint32_t arrived = 0;
  return cuda_shim::vote(cuda_shim::WarpOp::kBallot, mask, predicate != 0, &arrived, CUDA_SHIM_HERE);
}
inline int __any_sync(unsigned mask, int predicate, CUDA_SHIM_CALLER) {
  uint32_t arrived = 0;
  return cuda_shim::vote(cuda_shim::WarpOp::kAny, mask, predicate != 0, &arrived, CUDA_SHIM_HERE) != 0;
}
inline int __all_sync(unsigned mask, int predicate, CUDA_SHIM_CALLER) {
  uint32_t arrived = 0;
  const uint32_t votes = cuda_shim::vote(cuda_shim::WarpOp::kAll, mask, predicate != 0, &arrived, CUDA_SHIM_HERE);
  return votes == arrived;
}

template <class T>
T __reduce_add_sync(unsigned mask, T value, CUDA_SHIM_CALLER) {
  return cuda_shim::warp_reduce(mask, value, CUDA_SHIM_HERE, [](T a, T b) {
    return static_cast<T>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
  });
}
template <class T>
T __reduce_max_sync(unsigned mask, T value, CUDA_SHIM_CALLER) {
  return cuda_shim::warp_reduce(mask, value, CUDA_SHIM_HERE, [](T a, T b) { return a > b ? a : b; });
}
template <class T>
T __reduce_min_sync(unsigned mask, T value, CUDA_SHIM_CALLER) {
  return cuda_shim::warp_reduce(mask, value, CUDA_SHIM_HERE, [](T a, T b) { return a < b ? a : b; });
}
inline unsigned __reduce_and_sync(unsigned mask, unsigned value, CUDA_SHIM_CALLER) {
  return cuda_shim::warp_reduce(mask, value, CUDA_SHIM_HERE, [](unsigned a, unsigned b) { return a & b; });
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned value, CUDA_SHIM_CALLER) {
  return cuda_shim::warp_reduce(mask, value, CUDA_SHIM_HERE, [](unsigned a, unsigned b) { return a | b; });
}
inline unsigned __reduce_xor_sync(unsigned mask, unsigned value, CUDA_SHIM_CALLER) {
  return cuda_shim::warp_reduce(mask, value, CUDA_SHIM_HERE, [](unsigned a, unsigned b) { return a ^ b; });
}
// The lanes that took part with the same value as the calling one.
template <class T>
unsigned __match_any_sync(unsigned mask, T value, CUDA_SHIM_CALLER) {
  return cuda_shim::match(cuda_shim::WarpOp::kMatchAny, mask, value, nullptr, CUDA_SHIM_HERE);
}
// All lanes that took part, or 0 when their values differ; *all_equal says which.
template <class T>
unsigned __match_all_sync(unsigned mask, T value, int* all_equal, CUDA_SHIM_CALLER) {
  uint32_t arrived = 0;
  const unsigned same = cuda_shim::match(cuda_shim::WarpOp::kMatchAll, mask, value, &arrived, CUDA_SHIM_HERE);
  *all_equal = same == arrived;
  return *all_equal ? same : 0;
}
inline unsigned __activemask() = delete;  // tells nothing a kernel may rely on
