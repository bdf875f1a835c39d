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
  dim3 grid, cluster, block;
  size_t dynamic_shared_bytes;
};
void run_grid(const Launch& launch, const std::function<void()>& body);

// What a kernel did that CUDA leaves undefined, with the kernel, the threads and the lines.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Runs every block of the grid to completion on the calling OS thread, the blocks of one cluster together. As with
// <<<>>>, the arguments are converted to the kernel's parameters once, and every CUDA thread gets a copy. Throws Error,
// or what the kernel threw.
template <class... Params, class... Args>
void launch_clusters(const char* name, void (*kernel)(Params...), dim3 grid, dim3 cluster, dim3 block,
                     size_t dynamic_shared_bytes, Args&&... args) {
  const std::tuple<std::remove_cv_t<Params>...> params(std::forward<Args>(args)...);
  run_grid({name, reinterpret_cast<const void*>(kernel), grid, cluster, block, dynamic_shared_bytes},
           [&] { std::apply(kernel, params); });
}

// The same without clusters.
template <class... Params, class... Args>
void launch(const char* name, void (*kernel)(Params...), dim3 grid, dim3 block, size_t dynamic_shared_bytes,
            Args&&... args) {
  launch_clusters(name, kernel, grid, dim3(1), block, dynamic_shared_bytes, std::forward<Args>(args)...);
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
  unsigned cluster_rank, cluster_size;  // of the block, in blocks
  unsigned linear;                      // index in the block
  unsigned slot;                        // index in the cluster, every block beginning with a new warp
  unsigned lane, warp;
};
extern Context* current;  // the CUDA thread that runs; null outside launch()

void* dynamic_shared();
[[noreturn]] void fail(const std::string& message, Location where);

enum class BarrierKind : uint8_t { kPlain, kCount, kAnd, kOr };
int block_barrier(BarrierKind kind, bool predicate, Location where);

enum class WarpOp : uint8_t {
  kSync,
  kShuffle,
  kShuffleXor,
  kShuffleUp,
  kShuffleDown,
  kBallot,
  kAny,
  kAll,
  kReduce,
  kMatchAny,
  kMatchAll
};
struct LaneValues {
  const uint64_t* values;  // of the 32 lanes, valid until warp_leave()
  uint32_t arrived;        // lanes that took part
};
// Waits until every live lane of the mask has come to this operation; warp_leave() ends the reading of its values.
LaneValues warp_meet(WarpOp op, uint32_t mask, uint64_t value, Location where);
void warp_leave();

// Clusters. Every thread of the cluster alternates between arrive and wait.
void cluster_arrive(Location where);
void cluster_wait(Location where);
// Where the block of that rank has what lies at `address` in the calling block's dynamic shared memory.
void* map_shared(const void* address, unsigned rank, Location where);

// Barriers in shared memory, for threads and for bulk copies. An address names one; the word there is not used.
void mbarrier_init(const void* barrier, unsigned arrivals, Location where);
void mbarrier_init_fence();
// At the barrier that the block of that rank has at the address. First adds expected_bytes to what the phase waits for.
void mbarrier_arrive(const void* barrier, unsigned rank, uint32_t expected_bytes, Location where);
// Waits until the phase of this parity has ended.
void mbarrier_wait(const void* barrier, unsigned parity, Location where);

// Bulk copies complete after their issue, when and in which order the options say: as late as possible (forward:
// oldest first, reversed: newest first) or at random moments. Until then the destination holds NaN.
void bulk_load(void* shared, const void* global, uint32_t bytes, const void* barrier, Location where);
void bulk_store(void* global, const void* shared, uint32_t bytes, Location where);
void bulk_commit();
// Waits until at most `pending` of the thread's latest groups of stores are under way; read_only: until those have
// read their shared memory.
void bulk_wait(unsigned pending, bool read_only);
// Shows the thread's earlier writes of shared memory to bulk copies.
void fence_async_proxy();

// Tell the race checker; no-ops in the other builds.
void note_atomic(const void* address, size_t bytes, const void* pc);
void note_fence();

}  // namespace cuda_shim

// Reports of the race build name the line of a kernel only if what stands between is inlined.
#define CUDA_SHIM_INLINE inline __attribute__((always_inline))

// Trailing parameters that record where a kernel called an intrinsic, and their use.
#define CUDA_SHIM_CALLER const char *caller_file = __builtin_FILE(), int caller_line = __builtin_LINE()
#define CUDA_SHIM_HERE (::cuda_shim::Location{caller_file, caller_line})
