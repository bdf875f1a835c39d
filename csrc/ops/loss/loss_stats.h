// How the statistics of the policy loss are gathered: enum Stat of loss.h, a lane or a vector of them at a time.
#pragma once

#include "base/host_device.h"
#include "ops/loss/loss.h"

namespace areal::loss {

// Above exp(kMaxLogRatio): where a running minimum of ratios starts, finite so that empty statistics are too.
inline constexpr double kRatioBound = 5e8;

// What a statistic starts from, and how two parts of it join.
AREAL_HOST_DEVICE double empty_stat(int stat) { return stat == kNegativeRatioMin ? -kRatioBound : 0.0; }
AREAL_HOST_DEVICE double join_stat(int stat, double a, double b) {
  if (stat < kSumCount) return a + b;
  return a > b ? a : b;
}

// Running statistics of some tokens; Value is one lane or a vector of them.
template <class Value>
struct Accumulator {
  Value sum[kSumCount];
  Value max[kMaxCount];  // of statistic kSumCount + i

  AREAL_HOST_DEVICE void add(Stat stat, Value x) { sum[stat] += x; }
  AREAL_HOST_DEVICE Value& maximum(Stat stat) { return max[stat - kSumCount]; }
};

// In the place of an Accumulator: the loss and its gradient alone.
template <class Value>
struct NoStatistics {
  Value unused;
  AREAL_HOST_DEVICE void add(Stat, Value) {}
  AREAL_HOST_DEVICE Value& maximum(Stat) { return unused; }
};

template <class Lane, class Value = typename Lane::Value>
AREAL_HOST_DEVICE void reset(Accumulator<Value>& acc) {
  for (int i = 0; i < kSumCount; ++i) acc.sum[i] = Lane::splat(0);
  for (int i = 0; i < kMaxCount; ++i) acc.max[i] = Lane::splat(empty_stat(kSumCount + i));
}

template <class Lane, class Statistics, class Value = typename Lane::Value>
AREAL_HOST_DEVICE void raise_max(Statistics& acc, Stat stat, Value x) {
  Value& max = acc.maximum(stat);
  max = Lane::select(x > max, x, max);
}

}  // namespace areal::loss
