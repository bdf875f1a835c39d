#include "base/threads.h"

namespace areal {
namespace {
ParallelForFn g_parallel_for = nullptr;
NumThreadsFn g_num_threads = nullptr;
}  // namespace

void set_parallel_for(ParallelForFn parallel_for, NumThreadsFn num_threads) {
  g_parallel_for = parallel_for;
  g_num_threads = num_threads;
}

void parallel_for(int64_t begin, int64_t end, int64_t grain, RangeFn fn) {
  if (begin >= end) return;
  if (g_parallel_for == nullptr || end - begin <= grain || num_threads() == 1) {
    fn(begin, end);
  } else {
    g_parallel_for(begin, end, grain, fn);
  }
}

int64_t num_threads() {
  const int64_t n = g_num_threads == nullptr ? 1 : g_num_threads();
  return n < 1 ? 1 : n;
}

}  // namespace areal
