// Sums of doubles that do not depend on the order of the terms: the same bits for any packing, number of threads and
// split over ranks, on CPU and GPU.
//
// Each term is split on two fixed grids, coarse and fine, fine enough for 2^-(105 - 2 log2 count) of the bound and
// coarse enough that every partial sum is exact. Exact additions commute and associate.
//
// Source: Demmel and Nguyen, "Fast reproducible floating-point summation", ARITH 2013 (pre-rounding).
#pragma once

#include <cmath>
#include <cstdint>

#include "base/host_device.h"

namespace areal::advantages {

struct ExactSum {
  double coarse = 0;
  double fine = 0;

  AREAL_HOST_DEVICE double value() const { return coarse + fine; }
};

AREAL_HOST_DEVICE ExactSum merge(const ExactSum& a, const ExactSum& b) {
  return {a.coarse + b.coarse, a.fine + b.fine};
}

// Adding and subtracting 1.5 * 2^52 steps of a grid rounds to it.
struct SumGrid {
  double coarse;
  double fine;
};

// For at most `count` terms of absolute value at most `bound`.
AREAL_HOST_DEVICE SumGrid sum_grid(double bound, double count) {
  int bound_bits = 0, count_bits = 0;
  std::frexp(bound, &bound_bits);
  std::frexp(count, &count_bits);
  if (count == 0) return {0, 0};
  if (!(bound <= 1.7976931348623157e308)) return {bound, bound};  // infinity or NaN reaches the sum
  return {std::ldexp(1.5, bound_bits + count_bits), std::ldexp(1.5, bound_bits + 2 * count_bits - 53)};
}

// A term that is a product, rounded: in an fma with the grid it would be another number.
AREAL_HOST_DEVICE double product(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}

AREAL_HOST_DEVICE void add(double term, const SumGrid& grid, ExactSum& sum) {
  const double coarse = (term + grid.coarse) - grid.coarse;
  sum.coarse += coarse;
  sum.fine += ((term - coarse) + grid.fine) - grid.fine;
}

}  // namespace areal::advantages
