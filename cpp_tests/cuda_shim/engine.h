// Between the intrinsics (headers, compiled into every kernel) and the engine (cuda_shim library): who runs now, what a
// thread asks when it meets others, and the options of a launch.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

namespace cuda_shim {

// Which runnable thread goes next: the lowest, the highest, or by a permutation drawn anew at every block barrier.
enum class Order { kForward, kReversed, kRandom };

struct Options {
  Order order = Order::kForward;
  uint64_t seed = 1;
  // Volta and later let exited threads pass __syncthreads; it is an error here unless a test allows it.
  bool exited_threads_pass_barriers = false;
  size_t stack_bytes = 64 << 10;  // of each CUDA thread
};
Options& options();  // of the process, read at launch

// Which of the three builds this is (CMakeLists.txt).
enum class Variant { kPlain, kAsan, kRace };
Variant variant();

struct Launch {
  const char* name;
  const void* kernel;
  dim3 grid, block;
  size_t dynamic_shared_bytes;
};
void run_grid(const Launch& launch, const std::function<void()>& body);

// What a kernel did that CUDA leaves undefined, with the kernel, the threads and the lines.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Runs every block of the grid to completion on the calling OS thread. As with <<<>>>, the arguments are converted to
// the kernel's parameters once, and every CUDA thread gets a copy. Throws Error, or what the kernel threw.
template <class... Params, class... Args>
void launch(const char* name, void (*kernel)(Params...), dim3 grid, dim3 block, size_t dynamic_shared_bytes,
            Args&&... args) {
  const std::tuple<std::remove_cv_t<Params>...> params(std::forward<Args>(args)...);
  run_grid({name, reinterpret_cast<const void*>(kernel), grid, block, dynamic_shared_bytes},
           [&] { std::apply(kernel, params); });
}

// ---- for the intrinsics ----

struct Location {
  const char* file;
  int line;
};
bool operator==(const Location& a, const Location& b);

struct Context {
  uint3 thread_index, block_index;
  dim3 block_dim, grid_dim;
  unsigned linear;  // index in the block
  unsigned lane, warp;
};
extern Context* current;  // the CUDA thread that runs; null outside launch()

void* dynamic_shared();
[[noreturn]] void fail(const std::string& message, Location where);

enum class BarrierKind : uint8_t { kPlain, kCount, kAnd, kOr };
int block_barrier(BarrierKind kind, bool predicate, Location where);

enum class WarpOp : uint8_t { kSync, kShuffle, kShuffleXor, kShuffleUp, kShuffleDown, kBallot, kAny, kAll, kReduce };
struct LaneValues {
  const uint64_t* values;  // of the 32 lanes, valid until warp_leave()
  uint32_t arrived;        // lanes that took part
};
// Waits until every live lane of the mask has come to this operation; warp_leave() ends the reading of its values.
LaneValues warp_meet(WarpOp op, uint32_t mask, uint64_t value, Location where);
void warp_leave();

// Tell the race checker; no-ops in the other builds.
void note_atomic(const void* address, size_t bytes, const void* pc);
void note_fence();

}  // namespace cuda_shim

// Reports of the race build name the line of a kernel only if what stands between is inlined.
#define CUDA_SHIM_INLINE inline __attribute__((always_inline))

// Trailing parameters that record where a kernel called an intrinsic, and their use.
#define CUDA_SHIM_CALLER const char *caller_file = __builtin_FILE(), int caller_line = __builtin_LINE()
#define CUDA_SHIM_HERE (::cuda_shim::Location{caller_file, caller_line})
