#include "base/threads.h"

#include <atomic>
#include <exception>

namespace areal {
namespace {

ParallelForFn g_parallel_for = nullptr;
NumThreadsFn g_num_threads = nullptr;

// The first exception among the threads of a loop. A host's pool may drop the type and text of one that leaves a
// thread, or end the program over it.
class FirstException {
 public:
  void keep_current() {
    if (!taken_.test_and_set()) first_ = std::current_exception();
  }
  // After all threads are done.
  void rethrow() const {
    if (first_) std::rethrow_exception(first_);
  }

 private:
  std::atomic_flag taken_;
  std::exception_ptr first_;
};

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
    FirstException exception;
    g_parallel_for(begin, end, grain, [&](int64_t piece_begin, int64_t piece_end) {
      try {
        fn(piece_begin, piece_end);
      } catch (...) {
        exception.keep_current();
      }
    });
    exception.rethrow();
  }
}

int64_t num_threads() {
  const int64_t n = g_num_threads == nullptr ? 1 : g_num_threads();
  return n < 1 ? 1 : n;
}

}  // namespace areal
