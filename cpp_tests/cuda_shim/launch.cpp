#include <algorithm>
#include <mutex>
#include <numeric>
#include <random>
#include <vector>

#include "block.h"
#include "host_runtime.h"
#include "race_checker.h"

namespace cuda_shim {
namespace {

constexpr unsigned kMaxThreads = 1024;

void check(const Launch& launch) {
  const dim3 grid = launch.grid, block = launch.block;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  const auto refuse = [&](const std::string& what) {
    throw Error(std::string("cuda_shim: launch of '") + launch.name + "': expected " + what);
  };
  if (threads == 0 || threads > kMaxThreads || block.z > 64) {
    refuse("1 to 1024 threads a block, 64 along z, got " + std::to_string(threads));
  }
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) {
    refuse("a grid of 1 to (2147483647, 65535, 65535) blocks, got (" + std::to_string(grid.x) + ", " +
           std::to_string(grid.y) + ", " + std::to_string(grid.z) + ")");
  }
  if (launch.dynamic_shared_bytes > dynamic_shared_limit(launch.kernel)) {
    refuse("cudaFuncAttributeMaxDynamicSharedMemorySize >= " + std::to_string(launch.dynamic_shared_bytes) + ", got " +
           std::to_string(dynamic_shared_limit(launch.kernel)) + " bytes");
  }
}

std::vector<uint64_t> block_order(uint64_t count, const Options& options) {
  std::vector<uint64_t> order(count);
  std::iota(order.begin(), order.end(), uint64_t{0});
  if (options.order == Order::kReversed) std::reverse(order.begin(), order.end());
  if (options.order == Order::kRandom) std::shuffle(order.begin(), order.end(), std::mt19937_64(options.seed));
  return order;
}

}  // namespace

Context* current = nullptr;

Options& options() {
  static Options instance;
  return instance;
}

Variant variant() {
#if defined(CUDA_SHIM_RACE)
  return Variant::kRace;
#elif defined(CUDA_SHIM_ASAN)
  return Variant::kAsan;
#else
  return Variant::kPlain;
#endif
}

void run_grid(const Launch& launch, const std::function<void()>& body) {
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> guard(one_at_a_time);
  check(launch);
  Block block(launch, options(), body);
  race::on_launch(launch.name);
  const uint64_t row = launch.grid.x, plane = row * launch.grid.y;
  for (const uint64_t i : block_order(plane * launch.grid.z, options())) {
    block.run(
        {static_cast<unsigned>(i % row), static_cast<unsigned>(i % plane / row), static_cast<unsigned>(i / plane)});
  }
  race::on_launch_end();
}

void* dynamic_shared() { return running_thread().owner->dynamic_shared(); }
int block_barrier(BarrierKind kind, bool predicate, Location where) {
  return running_thread().owner->barrier(kind, predicate, where);
}
LaneValues warp_meet(WarpOp op, uint32_t mask, uint64_t value, Location where) {
  return running_thread().owner->warp_meet(op, mask, value, where);
}
void warp_leave() { running_thread().owner->warp_leave(); }

}  // namespace cuda_shim
