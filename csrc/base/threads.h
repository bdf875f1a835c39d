// parallel_for over an index range. The core owns no thread pool: the host program lends one through
// set_parallel_for (the Python module lends torch's, so torch.set_num_threads governs the ops). Without one the
// range runs in the calling thread. An exception thrown by fn reaches the caller as it is, the first if several threads
// throw; other pieces still run.
#pragma once

#include <cstdint>
#include <type_traits>

namespace areal {

// A non-owning reference to a callable (begin, end): cheaper than std::function and valid for the call only.
class RangeFn {
 public:
  template <class Fn>
    requires(!std::is_same_v<std::remove_cvref_t<Fn>, RangeFn>)
  RangeFn(const Fn& fn)  // NOLINT(google-explicit-constructor): an implicit view, like std::string_view
      : object_(&fn),
        call_([](const void* object, int64_t begin, int64_t end) { (*static_cast<const Fn*>(object))(begin, end); }) {}
  void operator()(int64_t begin, int64_t end) const { call_(object_, begin, end); }

 private:
  const void* object_;
  void (*call_)(const void*, int64_t, int64_t);
};

using ParallelForFn = void (*)(int64_t begin, int64_t end, int64_t grain, RangeFn fn);
using NumThreadsFn = int64_t (*)();

// Installs the pool to use from now on (nullptr: run in the calling thread). Not thread-safe; call at start-up.
void set_parallel_for(ParallelForFn parallel_for, NumThreadsFn num_threads);

// Splits [begin, end) into pieces of at least `grain` indices and runs fn(piece_begin, piece_end) on each.
void parallel_for(int64_t begin, int64_t end, int64_t grain, RangeFn fn);

// The number of threads a parallel_for can use, at least 1.
int64_t num_threads();

}  // namespace areal
