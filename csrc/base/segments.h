// A view of packed sequences: cu_seqlens is int64 [S+1], starts at 0 and never decreases; sequence s holds the
// tokens [cu_seqlens[s], cu_seqlens[s+1]). Empty sequences are legal. The view owns nothing.
#pragma once

#include <cstdint>

#include "base/check.h"

namespace areal {

struct Segments {
  const int64_t* cu_seqlens = nullptr;
  int64_t count = 0;  // S

  int64_t begin(int64_t s) const { return cu_seqlens[s]; }
  int64_t end(int64_t s) const { return cu_seqlens[s + 1]; }
  int64_t length(int64_t s) const { return end(s) - begin(s); }
  int64_t tokens() const { return count < 0 ? 0 : cu_seqlens[count]; }
};

// Checks the invariant of a host-resident view against the number of packed tokens; throws areal::Error.
inline void check_segments(const Segments& segments, int64_t tokens, const char* op) {
  AREAL_CHECK(segments.count >= 0, op, ": expected cu_seqlens with at least 1 element, got 0");
  AREAL_CHECK(segments.cu_seqlens[0] == 0, op, ": expected cu_seqlens[0] = 0, got ", segments.cu_seqlens[0]);
  for (int64_t s = 0; s < segments.count; ++s) {
    AREAL_CHECK(segments.length(s) >= 0, op, ": expected non-decreasing cu_seqlens, got cu_seqlens[", s,
                "] = ", segments.begin(s), " > cu_seqlens[", s + 1, "] = ", segments.end(s));
  }
  AREAL_CHECK(segments.tokens() == tokens, op, ": expected cu_seqlens[-1] = ", tokens,
              " (number of packed tokens), got ", segments.tokens());
}

}  // namespace areal
