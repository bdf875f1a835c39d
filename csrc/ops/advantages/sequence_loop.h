// parallel_for over sequences on the CPU. A sequence is the unit of work, so no bit depends on the threads.
#pragma once

#include "base/segments.h"
#include "base/threads.h"

namespace areal::advantages {

// fn(begin, end) on ranges of sequences.
template <class Fn>
void for_each_range(const Segments& segments, const Fn& fn) {
  if (segments.count == 0) return;
  constexpr int64_t kGrainTokens = 16384;
  const int64_t mean_tokens = segments.tokens() / segments.count + 1;
  parallel_for(0, segments.count, kGrainTokens / mean_tokens + 1, fn);
}

// fn(s) on each sequence.
template <class Fn>
void for_each_sequence(const Segments& segments, const Fn& fn) {
  for_each_range(segments, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) fn(s);
  });
}

}  // namespace areal::advantages
