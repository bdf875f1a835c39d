// Index arithmetic of segment copies, shared by the CPU version and the kernels.
#pragma once

#include <cstdint>

#include "base/host_device.h"

namespace areal {

// A value repeated over 16 bytes: any element size divides it.
struct alignas(16) FillPattern {
  unsigned char bytes[16] = {};
};

// The last index in [first, last] whose value is <= x, or first - 1 when there is none. values is non-decreasing.
AREAL_HOST_DEVICE int64_t last_at_most(const int64_t* values, int64_t first, int64_t last, int64_t x) {
  while (first <= last) {
    const int64_t middle = first + (last - first) / 2;
    if (values[middle] <= x) {
      first = middle + 1;
    } else {
      last = middle - 1;
    }
  }
  return last;
}

// See packing.h for the meaning and the contract.
struct SegmentMap {
  const int64_t* source_begin = nullptr;  // [count]
  const int64_t* target_begin = nullptr;  // [count]
  const int64_t* target_end = nullptr;    // [count]
  int64_t count = 0;
  int64_t shift = 0;
  int64_t source_rows = 0;
  int64_t target_rows = 0;

  // The segment that can hold target row `row`: the last one of [first, last] that begins at or before it.
  AREAL_HOST_DEVICE int64_t segment_of(int64_t row, int64_t first, int64_t last) const {
    return last_at_most(target_begin, first, last, row);
  }

  // The source row of target row `row`, given its segment; -1 where the row is filled.
  AREAL_HOST_DEVICE int64_t source_row(int64_t row, int64_t segment) const {
    if (segment < 0) return -1;
    const int64_t begin = target_begin[segment], end = target_end[segment];
    const int64_t offset = row - begin - shift;
    if (row >= end || offset < 0 || offset >= end - begin) return -1;
    const int64_t source = source_begin[segment] + offset;
    return source >= 0 && source < source_rows ? source : -1;
  }
};

}  // namespace areal
